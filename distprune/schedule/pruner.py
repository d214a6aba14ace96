"""ScheduledPruner: prunes by a schedule, in a training loop or a callback.

Its parameter groups have budgets and bounds of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from torch import nn

from distprune._common.amount import (
    FLOOR,
    Amount,
    Bounded,
    Bounds,
    SparsityBound,
    resolve_count,
    to_bounds,
)
from distprune._common.blocks import Scope
from distprune._common.collectives import Communicator
from distprune._common.exact_sums import Normalization, check_normalization
from distprune._common.naming import Pair, checked_pair, label_of, tied_places, unwrap
from distprune._common.process_groups import world
from distprune._common.schedules import Schedule
from distprune.api.global_unstructured import global_arguments
from distprune.api.local import remove
from distprune.budgets import BudgetLike, to_budget
from distprune.budgets.base import Sparsities
from distprune.call.grouping import InputDims, to_rule
from distprune.call.importance_scores import without_others
from distprune.call.report import ParameterReport, PruningReport, warn_of_collapse
from distprune.call.request import InGroups, ParameterArguments, PruningArguments
from distprune.call.run import Counted, count_live, prune_parameters
from distprune.masks.checks import check_removable
from distprune.masks.hook import find_hook
from distprune.methods.base import BasePruningMethod
from distprune.methods.builtin import L1Unstructured
from distprune.selection.within_bounds import limits_for
from distprune.shards.parameters import Scores
from distprune.shards.reader import ShardReader
from distprune.verification.report import VerificationReport
from distprune.verification.verifying import verify_parameters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
        parameters: (module, name) pairs, as ``select`` lists them; or, for groups with budgets of
            their own, dicts with "parameters" and, where they differ from the arguments below,
            "schedule", "pruning_method", "min_sparsity", "max_sparsity", "normalize", "budget",
            "scope", "pattern" and "input_dims", like the param groups of an optimizer.
        schedule: the sparsity at each step; may be left out if every group has one.
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
        budget: divides each target among the parameters, as for ``global_unstructured``. Of a
            mapping to sparsities only the ratios matter, because the schedule gives the totals.
        scope, pattern, input_dims: as for ``global_unstructured``. With the scope "layer" or "row"
            every layer or row has the sparsity of the schedule, rounded by itself. With a pattern
            N:M each group of M has lost round(sparsity * M) elements, at most M - N; the schedule
            has to end at (M - N) / M.

    Attributes:
        num_steps: number of calls of ``step()``; the next call is step number ``num_steps``.

    Raises:
        TypeError, ValueError: arguments of a wrong type; a parameter in two groups; bounds that
            the end of the schedule cannot meet.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]] | Iterable[Mapping[str, Any]],
        schedule: Schedule | None = None,
        *,
        pruning_method: type[BasePruningMethod] = L1Unstructured,
        importance_scores: Scores | Callable[[], Scores] | None = None,
        group: ProcessGroup | None = None,
        min_sparsity: SparsityBound | None = None,
        max_sparsity: SparsityBound | None = None,
        pipeline_parallel: bool = False,
        verify_every: int | None = None,
        normalize: Normalization | None = None,
        budget: BudgetLike | None = None,
        scope: Scope = "global",
        pattern: str | None = None,
        input_dims: InputDims | None = None,
    ) -> None:
        defaults = {
            "pipeline_parallel": pipeline_parallel,
            "schedule": schedule,
            "pruning_method": pruning_method,
            "min_sparsity": min_sparsity,
            "max_sparsity": max_sparsity,
            "normalize": normalize,
            "budget": budget,
            "scope": scope,
            "pattern": pattern,
            "input_dims": input_dims,
        }
        self._groups: list[Group] = make_groups(parameters, defaults)
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
        self._verify_every = verify_every
        self._importance_scores = importance_scores
        self._process_group = group
        self._is_pipeline_parallel = pipeline_parallel
        self.num_steps = 0
        self._has_pruned = [False] * len(self._groups)
        self._last_reports: tuple[PruningReport | None, ...] = (None,) * len(self._groups)

    def step(self) -> PruningReport | None:
        """Prune if a pruning is due after this step of the optimizer.

        Returns:
            A report; None if nothing was pruned. The report of several groups lists the
            parameters of all groups that were pruned now, and has no threshold, because each group
            has its own: see :attr:`last_reports`.

        Raises:
            ValueError: the ranks are at different steps, or have different schedules or
                targets; a function of the step that returns no sparsity.
            Exception: as ``global_unstructured``, on every rank. The step does not count then,
                and only groups before the one that failed have changed: a second call
                continues where the first one stopped.
            VerificationError: see ``verify_every``; on every rank. The step counts, and its
                pruning is done.

        Cost: nothing at a step that is not due, so the ranks are only compared where all
        of them prune. If one rank is at another step, where nothing is due, the others wait
        for it until the process group's timeout. At a due step
        a global pruning and a small all-reduce; with ``importance_scores`` one more read of
        the masks, and an all-reduce of 24 bytes per parameter.
        """
        reports = tuple(
            self._prune_group(position) if group.schedule.is_due(self.num_steps) else None
            for position, group in enumerate(self._groups)
        )
        self.num_steps += 1
        self._last_reports = reports
        done_now = (report is not None for report in reports)
        self._has_pruned = [a or b for a, b in zip(self._has_pruned, done_now, strict=True)]
        if self._verify_every is not None and self.num_steps % self._verify_every == 0:
            self.verify()
        done = [report for report in reports if report is not None]
        for report in done:
            warn_of_collapse(report)
        return merged(done) if done else None

    def verify(self) -> VerificationReport:
        """Check the masks of the parameters now; see :func:`distprune.verify`. Collective.

        Every parameter of a group that this object has pruned has to be pruned. Problems that only
        the whole model shows, such as a replaced module, are left to ``verify(model)``.

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
        """The (module, name) pairs of the groups that this object has pruned."""
        groups = zip(self._groups, self._has_pruned, strict=True)
        return [pair for group, has_pruned in groups if has_pruned for pair in group.parameters]

    @property
    def parameters(self) -> list[tuple[nn.Module, str]]:
        """The (module, name) pairs of all groups."""
        return [pair for group in self._groups for pair in group.parameters]

    @property
    def sparsity(self) -> float:
        """The present target, a share of all groups' elements; 0.0 until a pruning was due."""
        if len(self._groups) == 1:
            return self._groups[0].target
        total = sum(group.num_elements for group in self._groups)
        return sum(group.target * group.num_elements for group in self._groups) / max(total, 1)

    @property
    def last_reports(self) -> tuple[PruningReport | None, ...]:
        """The reports of the last ``step()``, per group; None for groups that were not due."""
        return self._last_reports

    def state_dict(self) -> dict[str, Any]:
        """The state, in plain Python values; the same on every rank.

        The masks belong to the model: save its state dict together with this one.
        """
        return {
            "num_steps": self.num_steps,
            "groups": [group.to_state() for group in self._groups],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a pruner with the same schedules and parameters.

        Raises:
            ValueError: the state has other schedules or parameters; says which. Nothing has
                changed then.
        """
        check_state(state, self.state_dict())
        self.num_steps = int(state["num_steps"])
        for group, saved in zip(self._groups, state["groups"], strict=True):
            group.target = float(saved["sparsity"])

    def remove(self) -> None:
        """Make the pruning final: the parameters become ordinary ones with zeros.

        Local on every rank. Call it when the schedule is over: a later pruning would
        rank the zeros like any other value.

        Raises:
            ValueError: a tied parameter has different masks under its names, from a call outside
                this pruner.
            RuntimeError: as ``remove``. No parameter has changed then.
        """
        pairs = [(unwrap(m), name) for group in self._groups for m, name in group.places]
        pairs = [pair for pair in pairs if find_hook(*pair) is not None]
        for module, name in pairs:
            check_removable(module, name)
        self._has_pruned = [False] * len(self._groups)
        for module, name in pairs:
            # It may have been removed with a parameter to which it is tied.
            if find_hook(module, name) is not None:
                remove(module, name)

    def _prune_group(self, position: int) -> PruningReport | None:
        group = self._groups[position]
        communicator = world(self._process_group)
        target = 0.0

        def make_arguments() -> ParameterArguments:
            nonlocal target
            # Never less than before.
            target = max(group.target, group.schedule.sparsity_at(self.num_steps))
            # Decides whether anything is due, where it does not follow from the masks.
            present = "any" if group.is_global else repr(group.target)
            return ParameterArguments(
                parameters=group.parameters,
                # Everything that decides whether a rank takes part in the next collective.
                facts=[
                    ("step of the schedule", str(self.num_steps)),
                    ("parameter group", f"{position} of {len(self._groups)}"),
                    ("pruning_method", getattr(group.pruning_method, "__name__", "")),
                    ("schedule", repr(group.schedule)),
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
            reads_values=not has_scores and group.pruning_method.READS_VALUES,
        )
        entries = counted.entries()
        group.join_stages(entries)
        # A function for the scores may change anything.
        reused = None if has_scores else counted
        if not group.is_global:
            scores = self._scores(position, communicator)
            return self._prune_in_groups(group, target, scores, reused)
        count = group.num_to_prune(target, entries)
        if count <= 0:
            group.target = target
            return None
        is_growing = group.is_growing(target, entries)
        bounds = group.bounds_now(is_growing)
        scores = self._scores(position, communicator)
        report = prune_parameters(
            lambda: group.arguments(scores, count, bounds), communicator, reused
        )
        group.target = target
        if not is_growing:
            return report
        # While the target grows, floors are passed as ceilings; report them as min_sparsity.
        return with_floors(report)

    def _prune_in_groups(
        self, group: Group, target: float, scores: Scores | None, counted: Counted | None
    ) -> PruningReport | None:
        """Give every layer, row or group of a pattern the target; None if none loses an element."""

        def make_arguments() -> PruningArguments:
            arguments = group.arguments(scores, float(target) if group.pattern is None else None)
            assert isinstance(arguments.share, InGroups)
            rule = replace(arguments.share.rule, sparsity=float(target))
            share = replace(arguments.share, rule=rule)
            return replace(arguments, share=share, amount=float(target))

        if target <= group.target:
            return None
        report = prune_parameters(make_arguments, world(self._process_group), counted)
        group.target = target
        return report

    def _scores(self, position: int, communicator: Communicator) -> Scores | None:
        """The scores of one group, from the mapping for all groups."""
        scores = self._importance_scores
        if scores is not None and not isinstance(scores, Mapping):
            scores = communicator.run(scores)
        mine = self._groups[position].places
        others = [
            place for i, group in enumerate(self._groups) if i != position for place in group.places
        ]
        return without_others(scores, mine, others)


@dataclass(eq=False)
class Group:
    """Parameters that share a budget.

    Args:
        parameters: (module, name) pairs.
        schedule, pruning_method, min_sparsity, max_sparsity, pipeline_parallel, normalize: as
            for ``ScheduledPruner``.
        budget, scope, pattern, input_dims: as there.

    Attributes:
        target: the present sparsity target, a share of all elements.
        names: per pair, the full name, or the parameter's name and position if that is unknown.

    Raises:
        ValueError: bounds that the end of the schedule cannot meet; a budget that does not fit the
            parameters.
    """

    parameters: Sequence[Pair]
    schedule: Schedule
    pruning_method: type[BasePruningMethod]
    min_sparsity: SparsityBound | None
    max_sparsity: SparsityBound | None
    pipeline_parallel: bool
    normalize: Normalization | None
    budget: BudgetLike | None
    scope: Scope
    pattern: str | None
    input_dims: InputDims | None
    target: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        check_normalization(self.normalize)
        self._check_scope()
        divides = not (self.budget is self.min_sparsity is self.max_sparsity is None)
        if divides and not self.is_global:
            raise ValueError(
                f"scope={self.scope!r}, pattern={self.pattern!r} beside a budget or bounds; "
                "expected one of them: each decides how much of every parameter is pruned."
            )
        budget = to_budget(self.budget)
        if isinstance(budget, Sparsities):  # the schedule gives the total: only ratios matter
            budget = Sparsities(budget.sparsities, relative=True)
        self._budget = budget
        self.names = [label_of(pair, position) for position, pair in enumerate(self.parameters)]
        self._sizes: list[int] = []
        self._keys: list[Any] = []
        self._bounds: Bounds | None = None
        if not self.pipeline_parallel:
            self._settle(self._bounded())

    def join_stages(self, entries: Sequence[ParameterReport]) -> None:
        """Under ``pipeline_parallel``, take the parameters of other ranks into account.

        Raises:
            ValueError: bounds that the end of the schedule cannot meet.
        """
        if self.pipeline_parallel:
            self._settle(
                [Bounded(entry.name, (entry.name,), entry.num_elements) for entry in entries]
            )

    def _settle(self, bounded: Sequence[Bounded]) -> None:
        self._sizes = [parameter.num_elements for parameter in bounded]
        self._keys = [parameter.keys[-1] for parameter in bounded]
        self._bounds = to_bounds(bounded, self.min_sparsity, self.max_sparsity)
        if self._budget is not None:
            self._budget.divide(bounded)  # raises if it does not fit
        self._check_end()

    def _bounded(self) -> list[Bounded]:
        """The parameters in the order of a report; a tied one is one entry with several pairs."""
        reader = ShardReader()
        tied: dict[Hashable, list[int]] = {}
        sizes: dict[Hashable, int] = {}
        for position, pair in enumerate(self.parameters):
            key, size = reader.identity(*pair)
            tied.setdefault(key, []).append(position)
            sizes[key] = size
        bounded = []
        for key, positions in tied.items():
            own = [self.parameters[i] for i in positions]
            pairs = [place for pair in own for place in (tuple(pair), *tied_places(pair))]
            names = [self.names[i] for i in positions]
            bounded.append(Bounded(names[0], (*names, *pairs), sizes[key]))
        return bounded

    @property
    def places(self) -> list[Pair]:
        """Every (module, name) of the parameters, tied names included."""
        return [place for pair in self.parameters for place in tied_places(pair)]

    @property
    def num_elements(self) -> int:
        """Elements of all parameters, each counted once."""
        return sum(self._sizes)

    def num_to_prune(self, target: float, entries: Sequence[ParameterReport]) -> int:
        """Elements to prune to reach a target; negative if more are pruned already."""
        return self._count(target) - sum(entry.num_pruned for entry in entries)

    @property
    def is_global(self) -> bool:
        """Whether one ranking of elements goes over all parameters."""
        return self.scope == "global" and self.pattern is None

    def is_growing(self, target: float, entries: Sequence[ParameterReport]) -> bool:
        """Whether a target is smaller than the sum of the floors, but may still grow.

        Then no parameter is pruned beyond its floor, so that the floors hold as soon as the target
        is no smaller than their sum.
        """
        end = self.schedule.ends_at
        if self._bounds is None or (end is not None and target >= end):
            return False
        pairs = zip(self._bounds.lowest, entries, strict=True)
        needed = sum(max(low, entry.num_pruned) for low, entry in pairs)
        return needed > self._count(target)

    def bounds_now(self, is_growing: bool) -> tuple[SparsityBound | None, SparsityBound | None]:
        """The floors and ceilings of the next pruning; while it is growing, floors are ceilings."""
        if not is_growing or self._bounds is None:
            return self.min_sparsity, self.max_sparsity
        counts = zip(self._keys, self._bounds.lowest, self._sizes, strict=True)
        return None, {key: Fraction(count, size) for key, count, size in counts if size}

    def arguments(
        self,
        scores: Scores | None,
        amount: Amount | None,
        bounds: tuple[SparsityBound | None, SparsityBound | None] = (None, None),
    ) -> PruningArguments:
        """The arguments of a pruning of the group, as ``global_unstructured`` makes them."""
        return global_arguments(
            self.parameters,
            self.pruning_method,
            scores,
            amount=amount,
            budget=self._budget,
            min_sparsity=bounds[0],
            max_sparsity=bounds[1],
            pipeline_parallel=self.pipeline_parallel,
            normalize=self.normalize,
            scope=self.scope,
            pattern=self.pattern,
            input_dims=self.input_dims,
        )

    def to_state(self) -> dict[str, Any]:
        """The group's schedule, parameters and target, as plain Python values."""
        return {
            "schedule": repr(self.schedule),
            # Under pipeline_parallel the ranks have different ones, and one state is saved.
            "parameters": [] if self.pipeline_parallel else list(self.names),
            "sparsity": self.target,
        }

    def _count(self, sparsity: float) -> int:
        """Halves to even, like any amount."""
        return resolve_count(float(sparsity), self.num_elements)

    def _check_scope(self) -> None:
        """Raise ValueError for a scope that is none, or a pattern that the schedule cannot meet."""
        rule = to_rule(self.scope, self.pattern, 0.0 if self.pattern is None else None)
        end = self.schedule.ends_at
        if rule is None or rule.kept_of is None or end is None:
            return
        n, m = rule.kept_of
        if resolve_count(float(end), m) != m - n:
            raise ValueError(
                f"{self.schedule} ends at a sparsity of {end}, and pattern={self.pattern!r} prunes "
                f"{m - n} of {m}; expected a schedule that ends at {(m - n) / m:.4g}."
            )

    def _check_end(self) -> None:
        if self._bounds is None or self.schedule.ends_at is None:
            return
        try:
            limits_for(self._count(self.schedule.ends_at), self._bounds, self._sizes, self._sizes)
        except ValueError as error:
            raise ValueError(
                f"the bounds cannot hold at the end of {self.schedule}: {error}"
            ) from None


def make_groups(parameters: Iterable[Any], defaults: Mapping[str, Any]) -> list[Group]:
    """One group from (module, name) pairs, or one group from each of several dicts.

    Args:
        parameters: as for ``ScheduledPruner``.
        defaults: the other arguments of :class:`Group`, for dicts that leave them out.

    Raises:
        TypeError, ValueError, AttributeError: an entry is malformed; says how.
    """
    entries = list(parameters)
    if not any(isinstance(entry, Mapping) for entry in entries):
        entries = [{"parameters": entries}]
    groups = [_make_group(position, entry, defaults) for position, entry in enumerate(entries)]
    owner: dict[Hashable, int] = {}
    reader = ShardReader()
    for position, group in enumerate(groups):
        for name, pair in zip(group.names, group.parameters, strict=True):
            key, _ = reader.identity(*pair)
            other = owner.setdefault(key, position)
            if other != position:
                raise ValueError(
                    f"{name} is in parameters[{other}] and in parameters[{position}]; expected "
                    "every parameter in one group, as each group has a budget of its own."
                )
    return groups


def _make_group(position: int, entry: Any, defaults: Mapping[str, Any]) -> Group:
    if not isinstance(entry, Mapping):
        raise TypeError(
            f"parameters[{position}] is a {type(entry).__name__} among dicts; expected either "
            "(module, name) pairs or dicts that have them as 'parameters'."
        )
    options = [name for name in defaults if name != "pipeline_parallel"]
    if not set(entry) <= {"parameters", *options} or "parameters" not in entry:
        raise ValueError(
            f"parameters[{position}] has the keys {list(entry)}; expected 'parameters', and "
            f"perhaps {', '.join(map(repr, options))}."
        )
    values = {**defaults, **entry, "parameters": list(entry["parameters"])}
    if not isinstance(values["schedule"], Schedule):
        raise TypeError(
            f"the schedule of parameters[{position}] is {values['schedule']!r}; expected one of "
            "distprune.schedule, such as Cubic(...)."
        )
    for number, pair in enumerate(values["parameters"]):
        checked_pair(pair, f"parameters of group {position}: entry [{number}]")
    if not values["parameters"] and not values["pipeline_parallel"]:
        raise ValueError(
            f"parameters[{position}] has no parameters; expected at least one (module, name) pair."
        )
    return Group(**values)


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


def merged(reports: Sequence[PruningReport]) -> PruningReport:
    """One report for all groups that were pruned at a step."""
    if len(reports) == 1:
        return reports[0]
    return PruningReport(
        method=", ".join(dict.fromkeys(report.method for report in reports)),
        amount=sum(int(report.amount or 0) for report in reports),
        parameters=tuple(entry for report in reports for entry in report.parameters),
        threshold=None,
        num_ties=0,
        num_ties_pruned=0,
        num_ranks=reports[0].num_ranks,
        num_collectives=sum(report.num_collectives for report in reports),
        bytes_sent=sum(report.bytes_sent for report in reports),
        seconds=sum(report.seconds for report in reports),
        collapsed=tuple(name for report in reports for name in report.collapsed),
    )


def check_state(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise if a state was saved with other groups, schedules or parameters.

    Args:
        saved: the state to load.
        present: the state of the pruner that is to load it.

    Raises:
        ValueError: says what differs.
    """
    if not set(present) <= set(saved):
        raise ValueError(
            f"the state has the keys {list(saved)}; expected {list(present)}, as state_dict() of a "
            "ScheduledPruner has them."
        )
    if len(saved["groups"]) != len(present["groups"]):
        raise ValueError(
            f"the state has {len(saved['groups'])} parameter groups and this pruner "
            f"{len(present['groups'])}; expected the groups that it was saved with."
        )
    for position, (old, new) in enumerate(zip(saved["groups"], present["groups"], strict=True)):
        if old["schedule"] != new["schedule"]:
            raise ValueError(
                f"the state of group {position} was saved with schedule {old['schedule']}, and "
                f"this pruner has {new['schedule']}; expected the same one."
            )
        if old["parameters"] != new["parameters"]:
            lost = [name for name in old["parameters"] if name not in new["parameters"]]
            added = [name for name in new["parameters"] if name not in old["parameters"]]
            raise ValueError(
                f"the state of group {position} was saved with other parameters: only in the "
                f"state: {', '.join(lost) or '(none)'}; only in this pruner: "
                f"{', '.join(added) or '(none)'}; expected the same ones, in the same order."
            )
