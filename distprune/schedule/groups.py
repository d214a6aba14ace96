"""Parameter groups of a pruner: budgets, bounds that apply at a step, its report and state."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from distprune._common.amount import FLOOR, Bounded, Bounds, SparsityBound, resolve_count, to_bounds
from distprune._common.blocks import Scope
from distprune._common.exact_sums import Normalization, check_normalization
from distprune._common.naming import Pair, checked_pair, label_of, tied_places
from distprune._common.schedules import Schedule
from distprune.budgets import BudgetLike, to_budget
from distprune.budgets.base import Budget, Sparsities
from distprune.call.grouping import InputDims, to_pattern, to_rule
from distprune.call.report import ParameterReport, PruningReport
from distprune.methods.base import BasePruningMethod
from distprune.selection.within_bounds import limits_for
from distprune.shards.reader import ShardReader


class Group:
    """Parameters that share a budget.

    Args:
        parameters: (module, name) pairs.
        schedule, pruning_method, min_sparsity, max_sparsity, pipeline_parallel, normalize: as
            for ``ScheduledPruner``.
        budget, scope, pattern, input_dims: as there.

    Attributes:
        names: per pair, the full name, or the parameter's name and position if that is unknown.
        target: the present sparsity target, a share of all elements.

    Raises:
        ValueError: bounds that the end of the schedule cannot meet; a budget that does not fit the
            parameters.
    """

    def __init__(
        self,
        parameters: Sequence[Pair],
        schedule: Schedule,
        pruning_method: type[BasePruningMethod],
        min_sparsity: SparsityBound | None,
        max_sparsity: SparsityBound | None,
        pipeline_parallel: bool = False,
        normalize: Normalization | None = None,
        budget: BudgetLike | None = None,
        scope: Scope = "global",
        pattern: str | None = None,
        input_dims: InputDims | None = None,
    ) -> None:
        check_normalization(normalize)
        self.scope: Scope = scope
        self.pattern = None if pattern is None else to_pattern(pattern)
        self.input_dims = input_dims
        self.schedule = schedule
        self._check_scope()
        if not self.is_global and (
            budget is not None or min_sparsity is not None or max_sparsity is not None
        ):
            raise ValueError(
                f"scope={scope!r}, pattern={pattern!r} beside a budget or bounds; expected one of "
                "them: each decides how much of every parameter is pruned."
            )
        self.budget = _scheduled(to_budget(budget))
        self.parameters = parameters
        self.normalize: Normalization | None = normalize
        self._limits = (min_sparsity, max_sparsity)
        self._is_joined = pipeline_parallel
        self.pruning_method = pruning_method
        self.target = 0.0
        self.names = [label_of(pair, position) for position, pair in enumerate(parameters)]
        self._sizes: list[int] = []
        self._keys: list[Any] = []
        self._bounds: Bounds | None = None
        if not pipeline_parallel:
            self._settle(self._bounded())

    def join_stages(self, entries: Sequence[ParameterReport]) -> None:
        """Under ``pipeline_parallel``, take the parameters of other ranks into account.

        Raises:
            ValueError: bounds that the end of the schedule cannot meet.
        """
        if self._is_joined:
            self._settle(
                [Bounded(entry.name, (entry.name,), entry.num_elements) for entry in entries]
            )

    def _settle(self, bounded: Sequence[Bounded]) -> None:
        self._sizes = [parameter.num_elements for parameter in bounded]
        self._keys = [parameter.keys[-1] for parameter in bounded]
        self._bounds = to_bounds(bounded, *self._limits)
        if self.budget is not None:
            self.budget.divide(bounded)  # raises if it does not fit
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

    def target_at(self, step: int) -> float:
        """The sparsity at a due step: the schedule's, but never less than the present target."""
        return max(self.target, self.schedule.sparsity_at(step))

    def num_to_prune(self, target: float, entries: Sequence[ParameterReport]) -> int:
        """Elements to prune to reach a target; negative if more are pruned already."""
        return self._count(target) - sum(entry.num_pruned for entry in entries)

    @property
    def is_global(self) -> bool:
        """Whether one ranking of elements goes over all parameters."""
        return self.scope == "global" and self.pattern is None

    @property
    def has_share(self) -> bool:
        """Whether the target is the amount of a pruning: a pattern N:M has none."""
        return self.pattern is None or self.pattern.tile is not None

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
            return self._limits
        counts = zip(self._keys, self._bounds.lowest, self._sizes, strict=True)
        return None, {key: Fraction(count, size) for key, count, size in counts if size}

    def to_state(self) -> dict[str, Any]:
        """The group's schedule, parameters and target, as plain Python values."""
        return {
            "schedule": repr(self.schedule),
            # Under pipeline_parallel the ranks have different ones, and one state is saved.
            "parameters": [] if self._is_joined else list(self.names),
            "sparsity": self.target,
        }

    def _count(self, sparsity: float) -> int:
        """Halves to even, like any amount."""
        return resolve_count(float(sparsity), self.num_elements)

    def _check_scope(self) -> None:
        """Raise ValueError for a scope that is none, or a pattern that the schedule cannot meet."""
        rule = to_rule(self.scope, self.pattern, 0.0 if self.has_share else None)
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


def _scheduled(budget: Budget | None) -> Budget | None:
    """A budget for any total: the schedule gives it, so of given sparsities only ratios matter."""
    if isinstance(budget, Sparsities):
        return Sparsities(budget.sparsities, relative=True)
    return budget


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
