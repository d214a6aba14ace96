"""When to prune, and how much: schedules of sparsity, and the pruner that follows one.

pruner = schedule.ScheduledPruner(
    prune.select(model),
    schedule.Cubic(begin=0, end=1000, frequency=100, final_sparsity=0.8),
)
for batch in loader:
    ...
    optimizer.step()
    report = pruner.step()  # on every rank; None where nothing was pruned
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import distprune.budgets as budgets
from distprune.api.global_unstructured import global_arguments
from distprune.api.local import remove
from distprune.api.select import select
from distprune.base.amount import CEILING, FLOOR, Bounded, Sparsities, resolve_count, to_bounds
from distprune.base.naming import Pair, label_of, tied_places
from distprune.base.schedules import Cubic, Function, Linear, OneShot, Schedule
from distprune.call.report import PruningReport, warn_of_collapse
from distprune.call.request import Decision, ParameterArguments, PruningArguments, PruningCall
from distprune.call.run import count_live, prune_parameters
from distprune.masks.hook import check_removable, find_hook
from distprune.methods.base import BasePruningMethod, L1Unstructured, RandomUnstructured
from distprune.methods.ranking import rank
from distprune.ranking.ranking import limits_for
from distprune.ranks.collectives import world
from distprune.shards.reader import Scores

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from distprune.recipes import Recipe

__all__ = ["Cubic", "Function", "Linear", "OneShot", "Schedule", "ScheduledPruner"]

# The keys of recipes that are arguments of ``select``, and those for checkpoints.
_SELECTION = ("include", "exclude", "names", "also", "min_ndim")
_FOR_CHECKPOINTS = ("groups", "statistics", "scores", "card")


class ScheduledPruner:
    """Prunes a model by a schedule, one ``step()`` after each step of the optimizer.

    At a due step the schedule's sparsity, a share of all elements, becomes an exact
    count: round(sparsity * elements), halves to even, minus the elements that the masks prune
    already. So the sparsity never decreases, and a model that was pruned before, or loaded
    with its masks, is pruned further to the target; if it has reached the target,
    nothing happens. Every element counts once, in shards, replicas and tied parameters too.

    Call ``step`` on every rank, once for each step of the optimizer (under gradient
    accumulation: not for every micro-batch), and save the state after it::

        for step, batch in enumerate(loader):
            ...
            optimizer.step()
            report = pruner.step()

    Args:
        parameters: (module, name) pairs, as ``select`` lists them. Parts of a model with budgets of
            their own have a pruner each.
        schedule: the sparsity at each step.
        pruning_method: a class, as for ``global_unstructured``; its ``amount`` is the count.
        importance_scores: as for ``global_unstructured``: a mapping, or a function without
            arguments that returns one. It is called on every rank before each pruning, so that it
            may communicate.
        group: the ranks that take part; every rank by default.
        budget: a function of the parameters and the sparsity of a step that returns the sparsity of
            each parameter: ``budgets.uniform``, ``budgets.erk``, or
            ``functools.partial(budgets.owl, ratios=ratios)``. Bounds are its keywords.
        options: ``min_sparsity``, ``max_sparsity``, ``normalize``, ``scope``, ``pattern``,
            ``input_dims``, ``pipeline_parallel`` and arguments of the pruning method, as for
            ``global_unstructured``.

            While a growing target is smaller than the sum of the floors, no parameter is pruned
            beyond its floor (its report then has the floors as ceilings); so the floors hold as
            soon as the target is large enough. The end of the schedule has to be, and the ceilings
            have to leave enough (the end of a :class:`Function` is unknown). With
            ``pipeline_parallel`` bounds are given by full name, and are checked when something is
            due.

            With the scope "layer" or "row" every layer or row has the sparsity of the schedule,
            rounded by itself. With a pattern N:M each group of M has lost round(sparsity * M)
            elements, at most M - N; the schedule has to end at (M - N) / M.

    Attributes:
        num_steps: number of calls of ``step()``; the next call is step number ``num_steps``.
        parameters: the (module, name) pairs.
        pruned_parameters: the same, once this object has pruned them; until then, and after
            ``remove``, none.
        sparsity: the present target, a share of all elements; 0.0 until a pruning was due.

    Raises:
        TypeError, ValueError: arguments of a wrong type, or that do not go together; no parameters;
            bounds or a pattern that the end of the schedule cannot meet; a bound of something else
            than the parameters.
        AttributeError: a module does not have a parameter of the name.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]],
        schedule: Schedule,
        *,
        pruning_method: type[BasePruningMethod] = L1Unstructured,
        importance_scores: Scores | Callable[[], Scores] | None = None,
        group: ProcessGroup | None = None,
        budget: Callable[[Sequence[Pair], float], Sparsities] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(schedule, Schedule):
            raise TypeError(f"schedule is {schedule!r}; expected one of distprune.schedule.")
        self.parameters: list[Pair] = list(parameters)
        self.pruned_parameters: list[Pair] = []
        self.num_steps = 0
        self.sparsity = 0.0
        self._schedule = schedule
        self._pruning_method = pruning_method
        self._importance_scores = importance_scores
        self._process_group = group
        self._budget = budget
        self._bounds = {name: options.pop(name, None) for name in (FLOOR, CEILING)}
        self._options = options
        self._is_pipeline = options.get("pipeline_parallel", False)
        scores = None if callable(importance_scores) else importance_scores
        rule = self._arguments(scores, 0, 0.0, self._bounds, {} if budget else None).rule
        self._is_global = rule is None
        named = [each for _, each in budgets.bounded(self.parameters)]
        if not self._is_pipeline:
            if not named:
                raise ValueError("parameters is empty; expected at least one (module, name) pair.")
            self._bounds_at(0.0, named, [0] * len(named))
        end = schedule.ends_at
        if rule is not None and rule.kept_of is not None and end is not None:
            n, m = rule.kept_of
            if resolve_count(end, m) != m - n:
                raise ValueError(
                    f"{schedule} ends at a sparsity of {end}, and the pattern {n}:{m} prunes "
                    f"{m - n} of {m}; expected a schedule that ends at {(m - n) / m:.4g}."
                )

    @classmethod
    def from_recipe(
        cls, model: nn.Module, recipe: Recipe, *, group: ProcessGroup | None = None
    ) -> ScheduledPruner:
        """A pruner of the parameters of a model that a recipe selects. Changes nothing yet.

        Args:
            model: plain, or wrapped in anything that distprune supports.
            recipe: a recipe; random scores start from its seed at every step, so that a resumed run
                continues as if it had not stopped.
            group: the ranks that take part; every rank by default.

        Raises:
            ValueError: a pattern matches nothing; the recipe has keys that are for checkpoints
                only.
        """
        values = recipe.model_dump(exclude_defaults=True)
        names = [key for key in _FOR_CHECKPOINTS if key in values]
        if recipe.score not in ("magnitude", "random"):
            names.append(f"score {recipe.score!r}")
        if recipe.budget == "owl":
            names.append("budget 'owl'")
        if names:
            raise ValueError(
                f"the recipe has {', '.join(names)}; expected none of that for a model, because "
                "it says what to do with a checkpoint. `distprune prune` prunes checkpoints."
            )
        options: dict[str, Any] = {}
        if recipe.has_limits:
            options = {FLOOR: recipe.min_sparsity, CEILING: recipe.max_sparsity}
        if recipe.budget is not None:
            options = {"budget": partial(getattr(budgets, recipe.budget), **options)}
        if recipe.score == "random":
            options["pruning_method"] = _seeded_random(recipe.seed or 0)
        options |= {key: getattr(recipe, key) for key in ("scope", "pattern", "input_dims")}
        pairs = select(model, **{key: getattr(recipe, key) for key in _SELECTION})
        return cls(pairs, recipe.course, group=group, normalize=recipe.divisor, **options)

    def step(self) -> PruningReport | None:
        """Prune if a pruning is due after this step of the optimizer.

        Returns:
            A report; None if nothing was pruned.

        Raises:
            ValueError: the ranks are at different steps, or have different schedules or
                targets; a function of the step that returns no sparsity.
            Exception: as ``global_unstructured``, on every rank. The step does not count then,
                and nothing has changed.

        Cost: nothing at a step that is not due, so the ranks are only compared where all
        of them prune. If one rank is at another step, where nothing is due, the others wait
        for it until the process group's timeout. At a due step
        a global pruning and a small all-reduce; with ``importance_scores`` one more read of
        the masks, and an all-reduce of 24 bytes per parameter.
        """
        report = self._prune() if self._schedule.is_due(self.num_steps) else None
        self.num_steps += 1
        if report is not None:
            warn_of_collapse(report)
        return report

    def state_dict(self) -> dict[str, Any]:
        """The state, in plain Python values; the same on every rank.

        The masks belong to the model: save its state dict together with this one.
        """
        # Under pipeline_parallel the ranks have different ones, and one state is saved.
        pairs = () if self._is_pipeline else self.parameters
        return {
            "num_steps": self.num_steps,
            "schedule": repr(self._schedule),
            "parameters": [label_of(pair, position) for position, pair in enumerate(pairs)],
            "sparsity": self.sparsity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a pruner with the same schedule and parameters.

        Raises:
            ValueError: the state has another schedule or other parameters; says which. Nothing has
                changed then.
        """
        present = self.state_dict()
        for key in ("schedule", "parameters"):
            if state[key] != present[key]:
                text = f"the state was saved with the {key} {state[key]}"
                raise ValueError(f"{text}; expected those of this pruner, {present[key]}.")
        self.num_steps = int(state["num_steps"])
        self.sparsity = float(state["sparsity"])

    def remove(self) -> None:
        """Make the pruning final: the parameters become ordinary ones with zeros.

        Local on every rank. Call it when the schedule is over: a later pruning would
        rank the zeros like any other value.

        Raises:
            ValueError: a tied parameter has different masks under its names, from a call outside
                this pruner.
            RuntimeError: as ``remove``. No parameter has changed then.
        """
        places = [place for pair in self.parameters for place in tied_places(pair)]
        pairs = [place for place in places if find_hook(*place) is not None]
        for pair in pairs:
            check_removable(*pair)
        self.pruned_parameters = []
        for pair in pairs:
            if find_hook(*pair) is not None:  # else it went with one to which it is tied
                remove(*pair)

    def _prune(self) -> PruningReport | None:
        ranks = world(self._process_group)
        target = 0.0

        def make_arguments() -> ParameterArguments:
            nonlocal target
            # Never less than before.
            target = max(self.sparsity, self._schedule.sparsity_at(self.num_steps))
            return ParameterArguments(
                parameters=self.parameters,
                # Everything that decides whether a rank takes part in the next collective.
                facts=[
                    ("step of the schedule", str(self.num_steps)),
                    ("pruning_method", getattr(self._pruning_method, "__name__", "")),
                    ("schedule", repr(self._schedule)),
                    ("target sparsity", repr(target)),
                    # In a global ranking the masks decide whether anything is due.
                    ("present sparsity", "any" if self._is_global else repr(self.sparsity)),
                    ("importance_scores", type(self._importance_scores).__name__),
                ],
                pipeline_parallel=self._is_pipeline,
            )

        scores = self._importance_scores
        counted = count_live(
            make_arguments, ranks, reads_values=scores is None and self._pruning_method.READS_VALUES
        )
        shards = counted[0]
        pruned = [t.numel - live for t, live in zip(*counted, strict=True)]
        count = resolve_count(target, sum(shard.numel for shard in shards)) - sum(pruned)
        if count <= 0 if self._is_global else target <= self.sparsity:
            self.sparsity = target
            return None
        if callable(scores):
            scores = ranks.run(scores)

        def arguments_of_step() -> PruningArguments:
            named = [Bounded(t.name, (t.name, *t.places), t.numel) for t in shards]
            bounds = self._bounds_at(target, named, pruned)
            shares = None if self._budget is None else self._budget(self.parameters, target)
            return self._arguments(scores, count, target, bounds, shares)

        # A function for the scores may change anything.
        reused = counted if self._importance_scores is None else None
        report = prune_parameters(arguments_of_step, ranks, reused)
        self.sparsity, self.pruned_parameters = target, list(self.parameters)
        return report

    def _arguments(
        self,
        scores: Scores | None,
        count: int,
        target: float,
        bounds: Mapping[str, Any],
        shares: Sparsities | None,
    ) -> PruningArguments:
        """The arguments of ``global_unstructured`` for a step, or those of any for checks."""
        pattern = self._options.get("pattern")
        amount: Any = count if self._options.get("scope", "global") == "global" else target
        if shares is not None or pattern is not None:
            amount = shares
        arguments = global_arguments(
            self.parameters, self._pruning_method, scores, amount=amount, **bounds, **self._options
        )
        if pattern is not None and arguments.rule is not None:
            # On the way to N:M a group has lost fewer elements.
            rule = replace(arguments.rule, sparsity=target)
            arguments = replace(arguments, rule=rule, amount=target)
        return arguments

    def _bounds_at(
        self, target: float, named: Sequence[Bounded], pruned: Sequence[int]
    ) -> Mapping[str, Any]:
        """The floors and ceilings of a step. Local.

        While a growing target is smaller than the sum of the floors, the floors are ceilings.

        Raises:
            ValueError: bounds that the end of the schedule cannot meet.
        """
        bounds, end = to_bounds(named, **self._bounds), self._schedule.ends_at
        if bounds is None:
            return self._bounds
        sizes = [each.num_elements for each in named]
        total = sum(sizes)
        if end is not None:
            try:
                limits_for(resolve_count(end, total), bounds, sizes, sizes)
            except ValueError as error:
                raise ValueError(
                    f"the bounds cannot hold at the end of {self._schedule}: {error}"
                ) from None
        needed = sum(map(max, bounds[0], pruned))
        if needed <= resolve_count(target, total) or (end is not None and target >= end):
            return self._bounds
        floors = zip(named, bounds[0], strict=True)
        return {CEILING: {e.keys[-1]: Fraction(low, e.num_elements or 1) for e, low in floors}}


def _seeded_random(seed: int) -> type[BasePruningMethod]:
    """RandomUnstructured that starts from the seed at every step.

    An element's score is then the same at every step: the elements pruned earlier have the lowest
    scores.
    """

    class SeededRandom(RandomUnstructured):
        def decide(self, call: PruningCall) -> Decision:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return rank(call, self.amount, is_random=True)

    # Ranks compare the names of their methods.
    SeededRandom.__qualname__ = f"SeededRandom(seed={seed})"
    return SeededRandom
