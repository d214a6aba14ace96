"""What a callback prunes and when: a schedule, a recipe or a function; and by which criterion."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from distprune.api.local import is_pruned
from distprune.api.select import select
from distprune.base.amount import Sparsities
from distprune.base.blocks import Scope
from distprune.base.exact_sums import Normalization
from distprune.base.schedules import Schedule
from distprune.call.report import PruningReport
from distprune.call.request import ParameterArguments
from distprune.call.run import count_live
from distprune.criteria.base import Criterion
from distprune.criteria.gradient_moment import GradientMoment
from distprune.masks.hook import put_records, records_of
from distprune.ranks.process_groups import world
from distprune.schedule import ScheduledPruner
from distprune.verification.verifying import verify

if TYPE_CHECKING:  # it needs pydantic
    from distprune.recipes import Recipe

Pairs = Sequence[tuple[nn.Module, str]]
MakeCriterion = Callable[[Pairs], Criterion]


class PlannedPruning:
    """What the callbacks of all trainers have: a plan, and the pruner and the reports of a run.

    Args:
        plan: a schedule; a recipe, or the path of one; or a function that makes a
            ``ScheduledPruner`` for the wrapped model.
        include, exclude, types, names: as for ``select``; with a schedule only.
        criterion: a class of ``distprune.criteria``, or a function of the (module, name) pairs
            that returns a criterion; with a schedule only.
        reset_criterion: forget what it collected after each pruning.
        scope, pattern, normalize, budget: as for ``ScheduledPruner``; with a schedule only.
        permanent: whether the zeros are made permanent when training ends.
        verify_every: number of steps after which the masks are checked; None: never.

    Raises:
        TypeError: a plan of another type, or something that goes with a schedule only.
    """

    def __init__(
        self,
        plan: Schedule | Recipe | str | Path | Callable[[nn.Module], ScheduledPruner],
        *,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] = (),
        types: type | tuple[type, ...] | None = None,
        names: str | Sequence[str] | None = None,
        criterion: MakeCriterion | None = None,
        reset_criterion: bool = False,
        scope: Scope = "global",
        pattern: str | None = None,
        normalize: Normalization | None = None,
        budget: Callable[[Pairs, float], Sparsities] | None = None,
        permanent: bool = True,
        verify_every: int | None = None,
    ) -> None:
        if isinstance(plan, str | Path):
            from distprune.recipes import load_recipe

            plan = load_recipe(plan)
        # Only a recipe has a course.
        self._course = plan if isinstance(plan, Schedule) else getattr(plan, "course", None)
        if self._course is None and not callable(plan):
            raise TypeError(
                f"plan is a {type(plan).__name__}; expected a schedule such as "
                "distprune.schedule.Cubic(...), a recipe, its path, or a function of the model "
                "that returns a ScheduledPruner."
            )
        selects = (include, exclude, types, names) != (None, (), None, None)
        ranks = (scope, pattern, normalize, budget) != ("global", None, None, None)
        for is_given, text in (
            (selects, "include, exclude, types and names go"),
            (ranks, "scope, pattern, normalize and budget go"),
            (criterion is not None, "criterion goes"),
        ):
            if is_given and not isinstance(plan, Schedule):
                raise TypeError(
                    f"{text} with a schedule; expected them in the recipe, or in the function "
                    "that makes the ScheduledPruner."
                )
        if criterion is None and reset_criterion:
            raise TypeError("reset_criterion=True goes with a criterion; expected one, or False.")
        if criterion is not None and (isinstance(criterion, Criterion) or not callable(criterion)):
            raise TypeError(
                f"criterion is a {type(criterion).__name__}; expected a class of "
                "distprune.criteria, or a function of the (module, name) pairs that returns a "
                "criterion: the parameters are known when the model has been wrapped."
            )
        if verify_every is not None and verify_every < 1:
            raise ValueError(
                f"verify_every={verify_every!r}; expected a number of steps >= 1, or None."
            )
        self._plan: Any = plan
        self._select = functools.partial(
            select, include=include, exclude=exclude, types=types, names=names
        )
        self._make_pruner = functools.partial(
            ScheduledPruner, scope=scope, pattern=pattern, normalize=normalize, budget=budget
        )
        self._make_criterion = criterion
        self._reset_criterion = reset_criterion
        self._permanent = permanent
        self._verify_every = verify_every
        self._model: nn.Module | None = None
        self._criterion: Criterion | None = None
        self.pruner: ScheduledPruner | None = None
        self.last_report: PruningReport | None = None

    def make_permanent(self) -> None:
        """Make the zeros permanent: ordinary parameters, which any program can load.

        Call it on every process. It ends the pruning; further training starts a new one.
        """
        if self.pruner is not None:
            self.pruner.remove()

    def _start(self, model: nn.Module) -> ScheduledPruner:
        """Make the pruner, and the criterion, for a wrapped model. Collective.

        Raises:
            Exception: parameters that cannot be pruned, before hours of training.
        """
        communicator = world()
        with communicator.raising_everywhere():
            pruner, self._criterion = self._made_for(model)
        parameters = pruner.parameters
        count_live(lambda: ParameterArguments(parameters=parameters), communicator)
        self.pruner, self._model = pruner, model
        return pruner

    def _made_for(self, model: nn.Module) -> tuple[ScheduledPruner, Criterion | None]:
        if isinstance(self._plan, Schedule):
            pairs = self._select(model)
            if self._make_criterion is None:
                return self._make_pruner(pairs, self._plan), None
            criterion = _checked_criterion(self._make_criterion(pairs))
            pruner = self._make_pruner(
                pairs,
                self._plan,
                pruning_method=criterion.pruning_method,
                importance_scores=criterion.scores,
            )
            return pruner, criterion
        if self._course is not None:
            return ScheduledPruner.from_recipe(model, self._plan), None
        pruner = self._plan(model)
        if not isinstance(pruner, ScheduledPruner):
            raise TypeError(f"plan returned a {type(pruner).__name__}; expected a ScheduledPruner.")
        return pruner, None

    def _state(self) -> dict[str, Any]:
        """The position in the schedule and the records of the masks, in plain values."""
        assert self.pruner is not None and self._model is not None
        return {"pruning": self.pruner.state_dict(), "masks": records_of(self._model)}

    def _resume(self, state: dict[str, Any], problem: str) -> None:
        """Load the state of a checkpoint whose masks the model has.

        Raises:
            RuntimeError: it has none; ``problem`` is the end of the sentence, and the way out.
        """
        assert self.pruner is not None and self._model is not None
        self.pruner.load_state_dict(state["pruning"])
        put_records(self._model, state.get("masks", {}))
        sparsity, parameters = self.pruner.sparsity, self.pruner.parameters
        if sparsity > 0 and not any(is_pruned(module) for module, _ in parameters):
            raise RuntimeError(
                f"the checkpoint of step {self.pruner.num_steps} is pruned to {sparsity:.2%}, and "
                f"{problem}"
            )

    def _warn_of_end(self, num_steps: int, logger: logging.Logger) -> None:
        """Warn if training ends before the schedule does."""
        if (schedule := self._course) is None:
            return
        end, reached = schedule.ends_at, schedule.sparsity_at(num_steps - 1)
        if end is not None and reached < end:
            logger.warning(
                "training ends after %d steps at sparsity %g, before the schedule does at %g: %s",
                num_steps, reached, end, schedule,
            )  # fmt: skip

    def _before_step(self) -> None:
        """Let the criterion read the gradients of a step of the optimizer."""
        if self._criterion is not None:
            self._criterion.update()

    def _prune(self, step: int) -> PruningReport | None:
        """Prune if that is due after a step, and verify the masks if that is."""
        assert self.pruner is not None and self._model is not None
        report = self.pruner.step()
        if self._verify_every is not None and step % self._verify_every == 0:
            verify(self._model, expected=self.pruner.pruned_parameters)
        if report is not None:
            if self._criterion is not None and self._reset_criterion:
                self._criterion.reset()
            self.last_report = report
        return report


def _checked_criterion(criterion: object) -> Criterion:
    name = type(criterion).__name__
    if not isinstance(criterion, Criterion):
        raise TypeError(
            f"criterion returned a {name}; expected a criterion of distprune.criteria, made of the "
            "parameters that it is called with."
        )
    if isinstance(criterion, GradientMoment) and criterion.unit == "rank_batch":
        raise NotImplementedError(
            f"{name} with unit='rank_batch' collects backwards inside of calibrating(), and a "
            "callback sees the averaged gradient of a step; expected "
            f"functools.partial({name}, unit='global_batch')."
        )
    return criterion
