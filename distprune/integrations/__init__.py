"""Pruning inside of other libraries; here, what the callbacks of all trainers have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from distprune.api.local import is_pruned
from distprune.api.select import select
from distprune.base.pruned_form import name_of_pruned_mask
from distprune.base.schedules import Schedule
from distprune.call.report import PruningReport
from distprune.call.request import ParameterArguments
from distprune.call.run import count_live
from distprune.checkpoint import prepare_for_load
from distprune.criteria.base import Criterion
from distprune.masks.hook import put_records, records_of
from distprune.ranks.collectives import world
from distprune.schedule import ScheduledPruner
from distprune.verification import verify

if TYPE_CHECKING:  # it needs pydantic
    from distprune.recipes import Recipe

logger = logging.getLogger(__name__)

# Arguments of ``select``; all others are those of ScheduledPruner.
_SELECTION = ("include", "exclude", "types", "names")


def pruning_state(model: nn.Module, pruner: ScheduledPruner | None) -> dict[str, Any]:
    """The position in a schedule and the records of the masks, in plain values.

    Args:
        model: wrapped or not.
        pruner: of its parameters; None: there are the records only.
    """
    pruning = None if pruner is None else pruner.state_dict()
    return {"pruning": pruning, "masks": records_of(model)}


def load_pruning_state(
    model: nn.Module, pruner: ScheduledPruner | None, state: dict[str, Any]
) -> None:
    """Load what :func:`pruning_state` returned; the model has its masks already."""
    if pruner is not None:
        pruner.load_state_dict(state["pruning"])
    put_records(model, state["masks"])


class PlannedPruning:
    """Prunes while something else trains: it makes a pruner for the model that it is given.

    Args:
        plan: a schedule; a recipe, or the path of one; or a function that makes a
            ``ScheduledPruner`` for the wrapped model.
        criterion: a class of ``distprune.criteria``, or a function of the (module, name) pairs
            that returns a criterion; with a schedule only.
        reset_criterion: forget what it collected after each pruning.
        permanent: whether the zeros are made permanent when training ends.
        verify_every: number of steps after which the masks are checked; None: never.
        options: with a schedule only: include, exclude, types, names, as for ``select``, and
            arguments of ``ScheduledPruner``.

    Raises:
        TypeError: a plan of another type, or something that goes with a schedule only.
    """

    pruner: ScheduledPruner | None = None
    last_report: PruningReport | None = None
    _model: nn.Module
    _criterion: Criterion | None = None

    def __init__(
        self,
        plan: Schedule | Recipe | str | Path | Callable[[nn.Module], ScheduledPruner],
        *,
        criterion: Callable[[Sequence[tuple[nn.Module, str]]], Criterion] | None = None,
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
        if (options or criterion is not None) and not isinstance(plan, Schedule):
            raise TypeError(
                f"{', '.join(options) or 'criterion'} go with a schedule; expected them in the "
                "recipe, or in the function that makes the ScheduledPruner."
            )
        if verify_every is not None and verify_every < 1:
            raise ValueError(
                f"verify_every={verify_every!r}; expected a number of steps >= 1, or None."
            )
        self._plan: Any = plan
        self._options = options
        self._make_criterion = criterion
        self._reset_criterion = reset_criterion
        self._permanent = permanent
        self._verify_every = verify_every

    def make_permanent(self) -> None:
        """Make the zeros permanent: ordinary parameters, which any program can load.

        Call it on every process. It ends the pruning; further training starts a new one.
        """
        if self.pruner is not None:
            self.pruner.remove()

    def _start(self, model: nn.Module, num_steps: float) -> ScheduledPruner:
        """Make the pruner, and the criterion, for a wrapped model. Collective.

        Warns if the training of ``num_steps`` ends before the schedule does.

        Raises:
            Exception: parameters that cannot be pruned, before hours of training.
        """
        ranks = world()
        with ranks.raising_everywhere():
            self.pruner = pruner = self._make_pruner(model)
        count_live(lambda: ParameterArguments(parameters=pruner.parameters), ranks)
        self._model = model
        if ranks.index == 0 and self._course is not None and num_steps < float("inf"):
            end, reached = self._course.ends_at, self._course.sparsity_at(int(num_steps) - 1)
            if end is not None and reached < end:
                logger.warning(
                    "training ends after %d steps at sparsity %g, before the schedule does at %g: "
                    "%s", num_steps, reached, end, self._course,
                )  # fmt: skip
        return pruner

    def _make_pruner(self, model: nn.Module) -> ScheduledPruner:
        self._criterion = None
        if isinstance(self._plan, Schedule):
            options = dict(self._options)
            pairs = select(model, **{key: options.pop(key) for key in _SELECTION if key in options})
            if self._make_criterion is not None:
                self._criterion = criterion = self._make_criterion(pairs)
                options["pruning_method"] = criterion.pruning_method
                options["importance_scores"] = criterion.scores
            return ScheduledPruner(pairs, self._plan, **options)
        if self._course is not None:
            return ScheduledPruner.from_recipe(model, self._plan)
        pruner = self._plan(model)
        if not isinstance(pruner, ScheduledPruner):
            raise TypeError(f"plan returned a {type(pruner).__name__}; expected a ScheduledPruner.")
        return pruner

    def _resume(self, state: dict[str, Any], problem: str) -> None:
        """Load the state of a checkpoint whose masks the model has.

        Raises:
            RuntimeError: it has none; ``problem`` is the end of the sentence, and the way out.
        """
        pruner = self.pruner
        assert pruner is not None
        load_pruning_state(self._model, pruner, state)
        if pruner.sparsity > 0 and not any(is_pruned(module) for module, _ in pruner.parameters):
            raise RuntimeError(
                f"the checkpoint of step {pruner.num_steps} is pruned to {pruner.sparsity:.2%}, "
                f"and {problem}"
            )

    def _prune(self) -> PruningReport | None:
        """Prune if that is due after a step of the optimizer, and verify the masks if that is."""
        pruner = self.pruner
        assert pruner is not None
        report = pruner.step()
        if self._verify_every is not None and pruner.num_steps % self._verify_every == 0:
            verify(self._model, expected=pruner.pruned_parameters)
        if report is not None:
            if self._criterion is not None and self._reset_criterion:
                self._criterion.reset()
            self.last_report = report
            if world().index == 0:
                logger.info(
                    "step %d: pruned to %.4f\n%s", pruner.num_steps, report.sparsity, report
                )
        return report


def add_masks(
    model: nn.Module, state_dict: dict[str, Tensor], prefix: str = "", *args: Any
) -> None:
    """Give a model masks of ones where a state dict has masks, before it is loaded.

    A pre-hook of ``load_state_dict``. It communicates where the model lacks masks.
    """
    values = {key.removeprefix(prefix): value for key, value in state_dict.items()}
    masks = {key for key in values if name_of_pruned_mask(key, values) is not None}
    if not masks <= dict(model.named_buffers(remove_duplicate=False)).keys():
        prepare_for_load(model, values)
