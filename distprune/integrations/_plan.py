"""What a callback prunes and when: a schedule, a recipe or a function; and by which criterion."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distprune._common.blocks import Scope
from distprune._common.exact_sums import Normalization
from distprune._common.process_groups import world
from distprune._common.schedules import Schedule
from distprune.api.select import select
from distprune.budgets import BudgetLike
from distprune.call.report import PruningReport
from distprune.call.request import ParameterArguments
from distprune.call.run import count_pruned
from distprune.criteria.base import Criterion
from distprune.criteria.global_batch import AdamSecondMoment
from distprune.criteria.gradient_moment import GradientMoment
from distprune.criteria.measured import MeasuredCriterion
from distprune.recipe import Recipe, load_recipe
from distprune.schedule.pruner import ScheduledPruner
from distprune.verification.verifying import verify

Pairs = Sequence[tuple[nn.Module, str]]
MakeCriterion = Callable[[Pairs], Criterion]


@dataclass(frozen=True)
class Selection:
    """What to prune, as for ``select``."""

    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] = ()
    types: type | tuple[type, ...] | None = None
    names: str | Sequence[str] | None = None


@dataclass(frozen=True)
class Ranking:
    """What a ``ScheduledPruner`` ranks together, as its arguments of these names."""

    scope: Scope = "global"
    pattern: str | None = None
    normalize: Normalization | None = None
    budget: BudgetLike | None = None


class Plan:
    """A plan, with all that it goes with, checked.

    Args:
        plan: a schedule; a recipe, or the path of one; or a function that makes a
            ``ScheduledPruner`` for the wrapped model.
        selection, ranking: with a schedule only.
        criterion: a class of ``distprune.criteria``, or a function of the (module, name) pairs
            that returns a criterion; with a schedule only.
        reset_criterion: forget what it collected after each pruning.

    Raises:
        TypeError: a plan of another type, or something that goes with a schedule only.
    """

    def __init__(
        self,
        plan: Schedule | Recipe | str | Path | Callable[[nn.Module], ScheduledPruner],
        selection: Selection,
        ranking: Ranking,
        criterion: MakeCriterion | None,
        reset_criterion: bool,
    ) -> None:
        if isinstance(plan, str | Path):
            plan = load_recipe(plan)
        if not isinstance(plan, Schedule | Recipe) and not callable(plan):
            raise TypeError(
                f"plan is a {type(plan).__name__}; expected a schedule such as "
                "distprune.schedule.Cubic(...), a recipe, its path, or a function of the model "
                "that returns a ScheduledPruner."
            )
        if not isinstance(plan, Schedule):
            for given, default, text in (
                (selection, Selection(), "include, exclude, types and names go"),
                (ranking, Ranking(), "scope, pattern, normalize and budget go"),
                (criterion, None, "criterion goes"),
            ):
                if given != default:
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
        self._plan = plan
        self._selection = selection
        self._ranking = ranking
        self._make_criterion = criterion
        self._reset_criterion = reset_criterion

    def start(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Started:
        """Make the pruner, and the criterion, for a wrapped model. Collective.

        Raises:
            Exception: parameters that cannot be pruned, before hours of training.
        """
        communicator = world()
        with communicator.raising_everywhere():
            started = self._started(model, optimizers)
        parameters = started.pruner.parameters
        count_pruned(lambda: ParameterArguments(parameters=parameters), communicator)
        return started

    def end_warning(self, num_steps: int) -> str | None:
        """What to warn of if training ends before the schedule does."""
        schedules = []
        if isinstance(self._plan, Schedule):
            schedules = [self._plan]
        elif isinstance(self._plan, Recipe):
            schedules = [part.course for part in self._plan.parts]
        for schedule in schedules:
            end, reached = schedule.ends_at, schedule.sparsity_at(num_steps - 1)
            if end is not None and reached < end:
                return (
                    f"training ends after {num_steps} steps at sparsity {reached:g}, before the "
                    f"schedule does at {end:g}: {schedule}"
                )
        return None

    def _started(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Started:
        if isinstance(self._plan, Recipe):
            return Started(self._plan.pruner(model))
        if isinstance(self._plan, Schedule):
            pairs = select(model, **vars(self._selection))
            make_pruner = functools.partial(
                ScheduledPruner, pairs, self._plan, **vars(self._ranking)
            )
            if self._make_criterion is None:
                return Started(make_pruner())
            criterion = _checked_criterion(self._make_criterion, pairs, optimizers)
            pruner = make_pruner(
                pruning_method=criterion.pruning_method, importance_scores=criterion.scores
            )
            return Started(pruner, criterion, self._reset_criterion)
        pruner = self._plan(model)
        if not isinstance(pruner, ScheduledPruner):
            raise TypeError(f"plan returned a {type(pruner).__name__}; expected a ScheduledPruner.")
        return Started(pruner)


@dataclass(frozen=True)
class Started:
    """A pruner, and the criterion that ranks for it, if there is one.

    Attributes:
        resets: whether the criterion forgets what it collected after each pruning.
    """

    pruner: ScheduledPruner
    criterion: Criterion | None = None
    resets: bool = False

    def before_step(self) -> None:
        """Let the criterion read the gradients of a step of the optimizer."""
        if self.criterion is not None and not isinstance(self.criterion, AdamSecondMoment):
            self.criterion.update()

    def after_pruning(self) -> None:
        """Reset the criterion, if it was asked for."""
        if self.criterion is not None and self.resets:
            self.criterion.reset()

    def criterion_state(self) -> dict[str, Any] | None:
        """The accumulators to save; None if there are none. Collective."""
        if self.criterion is None or not self.criterion.ACCUMULATOR:
            return None
        return self.criterion.state_dict()


class PlannedPruning:
    """What the callbacks of all trainers have: a plan, and the pruner and the reports of a run.

    Args:
        plan: as for :class:`Plan`, as are the arguments up to ``budget``.
        permanent: whether the zeros are made permanent when training ends.
        verify_every: number of steps after which the masks are checked; None: never.
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
        budget: BudgetLike | None = None,
        permanent: bool = True,
        verify_every: int | None = None,
    ) -> None:
        self._plan = Plan(
            plan,
            Selection(include, exclude, types, names),
            Ranking(scope, pattern, normalize, budget),
            criterion,
            reset_criterion,
        )
        if verify_every is not None and verify_every < 1:
            raise ValueError(
                f"verify_every={verify_every!r}; expected a number of steps >= 1, or None."
            )
        self._verify_every = verify_every
        self._permanent = permanent
        self._started: Started | None = None
        self._model: nn.Module | None = None
        self.last_report: PruningReport | None = None

    @property
    def pruner(self) -> ScheduledPruner | None:
        """The pruner; None before training."""
        return None if self._started is None else self._started.pruner

    def make_permanent(self) -> None:
        """Make the zeros permanent: ordinary parameters, which any program can load.

        Call it on every process. It ends the pruning; further training starts a new one.
        """
        if self._started is not None:
            self._started.pruner.remove()

    def _prune(self, step: int) -> PruningReport | None:
        """Prune if that is due after a step, and verify the masks if that is."""
        assert self._started is not None and self._model is not None
        pruner = self._started.pruner
        report = pruner.step()
        if self._verify_every is not None and step % self._verify_every == 0:
            verify(self._model, expected=pruner.pruned_parameters)
        if report is not None:
            self._started.after_pruning()
            self.last_report = report
        return report


def _checked_criterion(
    make: MakeCriterion, pairs: Pairs, optimizers: Sequence[torch.optim.Optimizer]
) -> Criterion:
    if len(optimizers) != 1:
        raise NotImplementedError(
            f"a criterion beside {len(optimizers)} optimizers, whose steps see different "
            "gradients; expected one."
        )
    of_optimizer: object = AdamSecondMoment
    criterion: object = (
        AdamSecondMoment(pairs, optimizers[0]) if make is of_optimizer else make(pairs)
    )
    name = type(criterion).__name__
    if not isinstance(criterion, Criterion):
        raise TypeError(
            f"criterion returned a {name}; expected a criterion of distprune.criteria, made of the "
            "parameters that it is called with."
        )
    if isinstance(criterion, MeasuredCriterion):
        raise NotImplementedError(
            f"{name} runs forwards and backwards itself, which a training loop does not give it; "
            "expected a criterion of gradients, such as Movement, SNIP, Taylor or Fisher."
        )
    if isinstance(criterion, GradientMoment) and criterion.unit == "rank_batch":
        raise NotImplementedError(
            f"{name} with unit='rank_batch' collects backwards inside of calibrating(), and a "
            "callback sees the averaged gradient of a step; expected "
            f"functools.partial({name}, unit='global_batch')."
        )
    return criterion
