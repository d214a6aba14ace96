"""What a callback prunes and when: a schedule, a recipe or a function; and by which criterion."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from distprune.api.global_unstructured import global_unstructured
from distprune.api.local import is_pruned
from distprune.api.select import select
from distprune.base.pruned_form import mask_key, name_of_pruned_mask
from distprune.base.schedules import Schedule
from distprune.call.report import PruningReport
from distprune.call.request import ParameterArguments
from distprune.call.run import count_live
from distprune.criteria.base import Criterion
from distprune.criteria.gradient_moment import GradientMoment
from distprune.masks.hook import put_records, records_of
from distprune.methods.builtin import Identity
from distprune.ranks.collectives import world
from distprune.schedule import ScheduledPruner
from distprune.verification.verifying import verify

if TYPE_CHECKING:  # it needs pydantic
    from distprune.recipes import Recipe

Pairs = Sequence[tuple[nn.Module, str]]
MakeCriterion = Callable[[Pairs], Criterion]


# Arguments of ``select``, which go with a schedule, as those of ScheduledPruner do.
_SELECTION = ("include", "exclude", "types", "names")
_RANKING = ("scope", "pattern", "normalize", "budget")


class PlannedPruning:
    """What the callbacks of all trainers have: a plan, and the pruner and the reports of a run.

    Args:
        plan: a schedule; a recipe, or the path of one; or a function that makes a
            ``ScheduledPruner`` for the wrapped model.
        criterion: a class of ``distprune.criteria``, or a function of the (module, name) pairs
            that returns a criterion; with a schedule only.
        reset_criterion: forget what it collected after each pruning.
        permanent: whether the zeros are made permanent when training ends.
        verify_every: number of steps after which the masks are checked; None: never.
        options: with a schedule only: include, exclude, types, names, as for ``select``, and scope,
            pattern, normalize, budget, as for ``ScheduledPruner``.

    Raises:
        TypeError: a plan of another type, or something that goes with a schedule only.
    """

    def __init__(
        self,
        plan: Schedule | Recipe | str | Path | Callable[[nn.Module], ScheduledPruner],
        *,
        criterion: MakeCriterion | None = None,
        reset_criterion: bool = False,
        permanent: bool = True,
        verify_every: int | None = None,
        **options: Any,
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
        for name in options:
            if name not in (*_SELECTION, *_RANKING):
                raise TypeError(
                    f"{name}: no such option; expected some of "
                    f"{', '.join((*_SELECTION, *_RANKING))}."
                )
        if criterion is not None:
            options["criterion"] = criterion
        if options and not isinstance(plan, Schedule):
            raise TypeError(
                f"{', '.join(options)} go with a schedule; expected them in the recipe, or in the "
                "function that makes the ScheduledPruner."
            )
        if isinstance(criterion, Criterion) or not (criterion is None or callable(criterion)):
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
        self._options = options
        self._make_criterion = options.pop("criterion", None)
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
        ranks = world()
        with ranks.raising_everywhere():
            self.pruner = self._made_for(model)
        arguments = ParameterArguments(parameters=self.pruner.parameters)
        count_live(lambda: arguments, ranks)
        self._model = model
        return self.pruner

    def _made_for(self, model: nn.Module) -> ScheduledPruner:
        """The pruner that the plan makes; with a criterion that the class keeps."""
        self._criterion = None
        if not isinstance(self._plan, Schedule):
            if self._course is not None:
                return ScheduledPruner.from_recipe(model, self._plan)
            pruner = self._plan(model)
            if not isinstance(pruner, ScheduledPruner):
                raise TypeError(
                    f"plan returned a {type(pruner).__name__}; expected a ScheduledPruner."
                )
            return pruner
        selection = {key: self._options[key] for key in _SELECTION if key in self._options}
        options = {key: self._options[key] for key in _RANKING if key in self._options}
        pairs = select(model, **selection)
        if self._make_criterion is not None:
            criterion = self._criterion = self._make_criterion(pairs)
            if isinstance(criterion, GradientMoment) and criterion.unit == "rank_batch":
                name = type(criterion).__name__
                raise NotImplementedError(
                    f"{name} with unit='rank_batch' collects backwards inside of calibrating(), "
                    "and a callback sees the averaged gradient of a step; expected "
                    f"functools.partial({name}, unit='global_batch')."
                )
            options["pruning_method"] = criterion.pruning_method
            options["importance_scores"] = criterion.scores
        return ScheduledPruner(pairs, self._plan, **options)

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


def add_masks(model: nn.Module, state_dict: dict[str, Tensor], *args: Any) -> None:
    """Give a model masks of ones where a state dict has masks, before it is loaded.

    A pre-hook of ``load_state_dict``. It communicates where the state dict has masks.
    """
    pruned = (name_of_pruned_mask(key, state_dict) for key in state_dict)
    names = {name for name in pruned if name is not None}
    if not names:
        return
    own_names = sorted({name.rpartition(".")[2] for name in names})
    pairs = select(model, "*", names=own_names, everything=True)
    missing = [p for p in pairs if p.fqn in names and mask_key(p[1]) not in p[0]._buffers]
    if missing:  # under all names of a tied parameter
        global_unstructured(missing, Identity)
