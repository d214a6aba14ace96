"""ScheduledPruner: prunes by a schedule, in a training loop or a callback."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distprune.api.global_unstructured import global_arguments
from distprune.api.local import remove
from distprune.api.select import select
from distprune.base.amount import (
    FLOOR,
    Amount,
    Bounded,
    Bounds,
    Sparsities,
    SparsityBound,
    resolve_count,
    to_bounds,
)
from distprune.base.blocks import Scope
from distprune.base.exact_sums import Normalization, check_normalization
from distprune.base.naming import Pair, checked_pair, label_of, tied_places, unwrap
from distprune.base.schedules import Schedule
from distprune.call.report import ParameterReport, PruningReport, warn_of_collapse
from distprune.call.request import (
    Decision,
    InputDims,
    ParameterArguments,
    PruningArguments,
    PruningCall,
)
from distprune.call.run import Counted, count_live, prune_parameters
from distprune.call.segments import to_rule
from distprune.masks.checks import check_removable
from distprune.masks.hook import find_hook
from distprune.methods.base import BasePruningMethod
from distprune.methods.builtin import L1Unstructured, RandomUnstructured
from distprune.methods.ranking import AT_RANDOM, rank
from distprune.ranking.within_bounds import limits_for
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import world
from distprune.shards.parameters import Scores
from distprune.shards.reader import ShardReader
from distprune.verification.report import VerificationReport
from distprune.verification.verifying import verify_parameters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Self

    from distprune.recipes import Recipe


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
        min_sparsity, max_sparsity: floors and ceilings of single parameters, as for
            ``global_unstructured``. While a growing target is smaller than the sum of the floors,
            no parameter is pruned beyond its floor; so the floors hold as soon as the target
            is large enough. The constructor checks that the final target is, and that the ceilings
            leave enough (except for a :class:`Function`, whose end is unknown).
        pipeline_parallel: the ranks have different parameters, with full names, as for
            ``global_unstructured``. Bounds are given by full name, and are checked at the first
            pruning.
        verify_every: number of steps after which to check, whether or not anything was due, that
            the masks act, and are those that the last pruning left: see ``verify``. None: never.
        normalize: what the scores of each parameter are divided by, as for
            ``global_unstructured``.
        budget: a function of the parameters and the sparsity of a step that returns the sparsity of
            each parameter: ``budgets.uniform``, ``budgets.erk``, or
            ``functools.partial(budgets.owl, ratios=ratios)``. Bounds are its keywords.
        scope, pattern, input_dims: as for ``global_unstructured``. With the scope "layer" or "row"
            every layer or row has the sparsity of the schedule, rounded by itself. With a pattern
            N:M each group of M has lost round(sparsity * M) elements, at most M - N; the schedule
            has to end at (M - N) / M.

    Attributes:
        num_steps: number of calls of ``step()``; the next call is step number ``num_steps``.

    Raises:
        TypeError, ValueError: arguments of a wrong type; bounds that the end of the schedule cannot
            meet.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]],
        schedule: Schedule,
        *,
        pruning_method: type[BasePruningMethod] = L1Unstructured,
        importance_scores: Scores | Callable[[], Scores] | None = None,
        group: ProcessGroup | None = None,
        min_sparsity: SparsityBound | None = None,
        max_sparsity: SparsityBound | None = None,
        pipeline_parallel: bool = False,
        verify_every: int | None = None,
        normalize: Normalization | None = None,
        budget: Callable[[Sequence[Pair], float], Sparsities] | None = None,
        scope: Scope = "global",
        pattern: str | None = None,
        input_dims: InputDims | None = None,
    ) -> None:
        if not isinstance(schedule, Schedule):
            raise TypeError(
                f"schedule is {schedule!r}; expected one of distprune.schedule, such as Cubic(...)."
            )
        if not (
            importance_scores is None
            or isinstance(importance_scores, Mapping)
            or callable(importance_scores)
        ):
            raise TypeError(
                f"importance_scores is a {type(importance_scores).__name__}; expected a dict from "
                "(module, name) to a tensor, or a function that returns one."
            )
        if verify_every is not None and (
            isinstance(verify_every, bool) or not isinstance(verify_every, int) or verify_every < 1
        ):
            raise ValueError(
                f"verify_every={verify_every!r}; expected a number of steps >= 1, or None."
            )
        self._parameters: list[Pair] = list(parameters)
        for number, pair in enumerate(self._parameters):
            checked_pair(pair, f"parameters[{number}]")
        if not self._parameters and not pipeline_parallel:
            raise ValueError("parameters is empty; expected at least one (module, name) pair.")
        check_normalization(normalize)
        self._schedule = schedule
        self._pruning_method = pruning_method
        self._importance_scores = importance_scores
        self._process_group = group
        self._min_sparsity, self._max_sparsity = min_sparsity, max_sparsity
        self._is_pipeline_parallel = pipeline_parallel
        self._verify_every = verify_every
        self._normalize = normalize
        self._scope, self._pattern = scope, pattern
        self._input_dims = input_dims
        self._check_scope()
        has_bounds = not (min_sparsity is max_sparsity is None)
        if (budget is not None) + has_bounds + (not self._is_global) > 1:
            raise ValueError(
                f"scope={scope!r}, pattern={pattern!r}, budget={budget!r} and bounds of the "
                "sparsity; expected one of them: each decides how much of every parameter is "
                "pruned. The functions of distprune.budgets take bounds as keywords."
            )
        if not (budget is None or callable(budget)):
            raise TypeError(
                f"budget is {budget!r}; expected a function such as distprune.budgets.erk."
            )
        self._budget = budget
        self._names = [label_of(pair, position) for position, pair in enumerate(self._parameters)]
        self.num_steps = 0
        self._target = 0.0
        self._has_pruned = False
        self._sizes: list[int] = []
        self._keys: list[Any] = []
        self._bounds: Bounds | None = None
        if not pipeline_parallel:
            self._settle(self._bounded())

    @classmethod
    def from_recipe(
        cls, model: nn.Module, recipe: Recipe, *, group: ProcessGroup | None = None
    ) -> Self:
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
        values = recipe.model_dump()
        only: dict[str, Any] = {"groups": (), "statistics": None, "scores": None}
        only |= {"nan": "error", "masks": True, "card": True}
        names = [key for key, default in only.items() if values[key] != default]
        names += [f"score {recipe.score!r}"] * (recipe.score not in ("magnitude", "random"))
        names += ["budget 'owl'"] * (recipe.budget == "owl")
        if names:
            raise ValueError(
                f"the recipe has {', '.join(names)}; expected none of that for a model, because "
                "it says what to do with a checkpoint. `distprune prune` prunes checkpoints."
            )
        bounds: dict[str, Any] = {}
        if recipe.has_limits:
            bounds = {"min_sparsity": recipe.min_sparsity, "max_sparsity": recipe.max_sparsity}
        if recipe.budget is not None:
            from distprune import budgets

            rule = budgets.erk if recipe.budget == "erk" else budgets.uniform
            bounds = {"budget": partial(rule, **bounds)}
        is_random = recipe.score == "random"
        return cls(
            select(
                model,
                recipe.include,
                recipe.exclude,
                names=recipe.names,
                also=recipe.also,
                min_ndim=recipe.min_ndim,
            ),
            recipe.course,
            pruning_method=_seeded_random(recipe.seed or 0) if is_random else L1Unstructured,
            group=group,
            normalize=recipe.divisor,
            **bounds,
            scope=recipe.scope,
            pattern=recipe.pattern,
            input_dims=recipe.input_dims,
        )

    def step(self) -> PruningReport | None:
        """Prune if a pruning is due after this step of the optimizer.

        Returns:
            A report; None if nothing was pruned.

        Raises:
            ValueError: the ranks are at different steps, or have different schedules or
                targets; a function of the step that returns no sparsity.
            Exception: as ``global_unstructured``, on every rank. The step does not count then,
                and nothing has changed.
            VerificationError: see ``verify_every``; on every rank. The step counts, and its
                pruning is done.

        Cost: nothing at a step that is not due, so the ranks are only compared where all
        of them prune. If one rank is at another step, where nothing is due, the others wait
        for it until the process group's timeout. At a due step
        a global pruning and a small all-reduce; with ``importance_scores`` one more read of
        the masks, and an all-reduce of 24 bytes per parameter.
        """
        report = self._prune() if self._schedule.is_due(self.num_steps) else None
        self.num_steps += 1
        self._has_pruned = self._has_pruned or report is not None
        if self._verify_every is not None and self.num_steps % self._verify_every == 0:
            self.verify()
        if report is not None:
            warn_of_collapse(report)
        return report

    def verify(self) -> VerificationReport:
        """Check the masks of the parameters now; see :func:`distprune.verify`. Collective.

        Once this object has pruned them, every parameter has to be pruned. Problems that only the
        whole model shows, such as a replaced module, are left to ``verify(model)``.

        Returns:
            A report, the same on every rank.

        Raises:
            VerificationError: something is wrong; on every rank.
        """
        return verify_parameters(
            self.parameters,
            world(self._process_group),
            pruned=self.pruned_parameters,
            pipeline_parallel=self._is_pipeline_parallel,
        )

    @property
    def pruned_parameters(self) -> list[tuple[nn.Module, str]]:
        """The (module, name) pairs, if this object has pruned them; else none."""
        return self.parameters if self._has_pruned else []

    @property
    def parameters(self) -> list[tuple[nn.Module, str]]:
        """The (module, name) pairs."""
        return list(self._parameters)

    @property
    def sparsity(self) -> float:
        """The present target, a share of all elements; 0.0 until a pruning was due."""
        return self._target

    def state_dict(self) -> dict[str, Any]:
        """The state, in plain Python values; the same on every rank.

        The masks belong to the model: save its state dict together with this one.
        """
        return {
            "num_steps": self.num_steps,
            "schedule": repr(self._schedule),
            # Under pipeline_parallel the ranks have different ones, and one state is saved.
            "parameters": [] if self._is_pipeline_parallel else list(self._names),
            "sparsity": self._target,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a pruner with the same schedule and parameters.

        Raises:
            ValueError: the state has another schedule or other parameters; says which. Nothing has
                changed then.
        """
        present = self.state_dict()
        if not set(present) <= set(state):
            raise ValueError(
                f"the state has the keys {list(state)}; expected {list(present)}, as state_dict() "
                "of a ScheduledPruner has them."
            )
        if state["schedule"] != present["schedule"]:
            raise ValueError(
                f"the state was saved with schedule {state['schedule']}, and this pruner has "
                f"{present['schedule']}; expected the same one."
            )
        if state["parameters"] != present["parameters"]:
            lost = [name for name in state["parameters"] if name not in present["parameters"]]
            added = [name for name in present["parameters"] if name not in state["parameters"]]
            raise ValueError(
                "the state was saved with other parameters: only in the state: "
                f"{', '.join(lost) or '(none)'}; only in this pruner: "
                f"{', '.join(added) or '(none)'}; expected the same ones, in the same order."
            )
        self.num_steps = int(state["num_steps"])
        self._target = float(state["sparsity"])

    def remove(self) -> None:
        """Make the pruning final: the parameters become ordinary ones with zeros.

        Local on every rank. Call it when the schedule is over: a later pruning would
        rank the zeros like any other value.

        Raises:
            ValueError: a tied parameter has different masks under its names, from a call outside
                this pruner.
            RuntimeError: as ``remove``. No parameter has changed then.
        """
        places = [place for pair in self._parameters for place in tied_places(pair)]
        pairs = [(unwrap(module), name) for module, name in places]
        pairs = [pair for pair in pairs if find_hook(*pair) is not None]
        for module, name in pairs:
            check_removable(module, name)
        self._has_pruned = False
        for module, name in pairs:
            # It may have been removed with a parameter to which it is tied.
            if find_hook(module, name) is not None:
                remove(module, name)

    def _prune(self) -> PruningReport | None:
        communicator = world(self._process_group)
        target = 0.0

        def make_arguments() -> ParameterArguments:
            nonlocal target
            # Never less than before.
            target = max(self._target, self._schedule.sparsity_at(self.num_steps))
            # Decides whether anything is due, where it does not follow from the masks.
            present = "any" if self._is_global else repr(self._target)
            return ParameterArguments(
                parameters=self._parameters,
                # Everything that decides whether a rank takes part in the next collective.
                facts=[
                    ("step of the schedule", str(self.num_steps)),
                    ("pruning_method", getattr(self._pruning_method, "__name__", "")),
                    ("schedule", repr(self._schedule)),
                    ("target sparsity", repr(target)),
                    ("present sparsity", present),
                    ("importance_scores", type(self._importance_scores).__name__),
                ],
                pipeline_parallel=self._is_pipeline_parallel,
            )

        has_scores = self._importance_scores is not None
        counted = count_live(
            make_arguments,
            communicator,
            reads_values=not has_scores and self._pruning_method.READS_VALUES,
        )
        entries = counted.entries()
        if self._is_pipeline_parallel:  # other ranks have parameters, too
            self._settle([Bounded(each.name, (each.name,), each.num_elements) for each in entries])
        # A function for the scores may change anything.
        reused = None if has_scores else counted
        if not self._is_global:
            scores = self._scores(communicator)
            return self._prune_in_groups(target, scores, communicator, reused)
        count = self._count(target) - sum(entry.num_pruned for entry in entries)
        if count <= 0:
            self._target = target
            return None
        is_growing = self._is_growing(target, entries)
        scores = self._scores(communicator)
        amount: Amount | Sparsities = count
        if self._budget is not None:
            amount = communicator.run(partial(self._budget, self._parameters, target))
        report = prune_parameters(
            lambda: self._arguments(scores, amount, is_growing), communicator, reused
        )
        self._target = target
        return with_floors(report) if is_growing else report

    def _prune_in_groups(
        self,
        target: float,
        scores: Scores | None,
        communicator: Communicator,
        counted: Counted | None,
    ) -> PruningReport | None:
        """Give every layer, row or group of a pattern the target; None if none loses an element."""

        def make_arguments() -> PruningArguments:
            arguments = self._arguments(scores, float(target) if self._pattern is None else None)
            assert arguments.rule is not None
            rule = replace(arguments.rule, sparsity=float(target))
            return replace(arguments, rule=rule, amount=float(target))

        if target <= self._target:
            return None
        report = prune_parameters(make_arguments, communicator, counted)
        self._target = target
        return report

    def _scores(self, communicator: Communicator) -> Scores | None:
        scores = self._importance_scores
        if scores is None or isinstance(scores, Mapping):
            return scores
        return communicator.run(scores)

    def _settle(self, bounded: Sequence[Bounded]) -> None:
        """Take in the parameters of all ranks.

        Raises:
            ValueError: bounds that the end of the schedule cannot meet.
        """
        self._sizes = [parameter.num_elements for parameter in bounded]
        self._keys = [parameter.keys[-1] for parameter in bounded]
        self._bounds = to_bounds(bounded, self._min_sparsity, self._max_sparsity)
        end = self._schedule.ends_at
        if self._bounds is None or end is None:
            return
        try:
            limits_for(self._count(end), self._bounds, self._sizes, self._sizes)
        except ValueError as error:
            raise ValueError(
                f"the bounds cannot hold at the end of {self._schedule}: {error}"
            ) from None

    def _bounded(self) -> list[Bounded]:
        """The parameters in the order of a report; a tied one is one entry with several pairs."""
        reader = ShardReader()
        tied: dict[Hashable, list[int]] = {}
        sizes: dict[Hashable, int] = {}
        for position, pair in enumerate(self._parameters):
            key, shape = reader.identity(*pair)
            tied.setdefault(key, []).append(position)
            sizes[key] = shape.numel()
        bounded = []
        for key, positions in tied.items():
            own = [self._parameters[i] for i in positions]
            pairs = [place for pair in own for place in (tuple(pair), *tied_places(pair))]
            names = [self._names[i] for i in positions]
            bounded.append(Bounded(names[0], (*names, *pairs), sizes[key]))
        return bounded

    @property
    def _is_global(self) -> bool:
        """Whether one ranking of elements goes over all parameters."""
        return self._scope == "global" and self._pattern is None

    def _count(self, sparsity: float) -> int:
        """Elements of a share of all, halves to even; each counts once."""
        return resolve_count(float(sparsity), sum(self._sizes))

    def _is_growing(self, target: float, entries: Sequence[ParameterReport]) -> bool:
        """Whether a target is smaller than the sum of the floors, but may still grow.

        Then no parameter is pruned beyond its floor, so that the floors hold as soon as the target
        is no smaller than their sum.
        """
        end = self._schedule.ends_at
        if self._bounds is None or (end is not None and target >= end):
            return False
        pairs = zip(self._bounds.lowest, entries, strict=True)
        needed = sum(max(low, entry.num_pruned) for low, entry in pairs)
        return needed > self._count(target)

    def _arguments(
        self, scores: Scores | None, amount: Amount | Sparsities | None, is_growing: bool = False
    ) -> PruningArguments:
        """The arguments of a pruning, as ``global_unstructured`` makes them.

        While the target is growing, floors are passed as ceilings.
        """
        low, high = self._min_sparsity, self._max_sparsity
        if is_growing and self._bounds is not None:
            counts = zip(self._keys, self._bounds.lowest, self._sizes, strict=True)
            low, high = None, {key: Fraction(count, size) for key, count, size in counts if size}
        return global_arguments(
            self._parameters,
            self._pruning_method,
            scores,
            amount=amount,
            min_sparsity=low,
            max_sparsity=high,
            pipeline_parallel=self._is_pipeline_parallel,
            normalize=self._normalize,
            scope=self._scope,
            pattern=self._pattern,
            input_dims=self._input_dims,
        )

    def _check_scope(self) -> None:
        """Raise ValueError for a scope that is none, or a pattern that the schedule cannot meet."""
        rule = to_rule(self._scope, self._pattern, 0.0 if self._pattern is None else None)
        end = self._schedule.ends_at
        if rule is None or rule.kept_of is None or end is None:
            return
        n, m = rule.kept_of
        if resolve_count(float(end), m) != m - n:
            raise ValueError(
                f"{self._schedule} ends at a sparsity of {end}, and pattern={self._pattern!r} "
                f"prunes {m - n} of {m}; expected a schedule that ends at {(m - n) / m:.4g}."
            )


def with_floors(report: PruningReport) -> PruningReport:
    """The report of a pruning to which floors were passed as ceilings."""
    entries = (
        replace(
            entry,
            held_at=entry.held_at and FLOOR,
            min_sparsity=entry.max_sparsity,
            max_sparsity=None,
        )
        for entry in report.parameters
    )
    return replace(report, parameters=tuple(entries))


def _seeded_random(seed: int) -> type[BasePruningMethod]:
    """RandomUnstructured that starts from the seed at every step.

    An element's score is then the same at every step: the elements pruned earlier have the lowest
    scores.
    """

    class SeededRandom(RandomUnstructured):
        def decide(self, call: PruningCall) -> Decision:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return rank(call, self.amount, AT_RANDOM)

    # Ranks compare the names of their methods.
    SeededRandom.__qualname__ = f"SeededRandom(seed={seed})"
    return SeededRandom
