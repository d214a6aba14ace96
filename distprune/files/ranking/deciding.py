"""Where the ranking of each group is cut: found exactly, in one read of 16-bit weights.

All groups are counted in the same read. Histograms of sixteen bits of the keys at a time are kept
for each unit and summed over all ranks; that of the last sixteen bits of a unit says how many ties
at the threshold it has, so that these need no other read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distprune.files.errors import SelectionError
from distprune.files.planning import Plan
from distprune.files.ranking.limited_search import LimitedSearch
from distprune.files.ranking.scores import Array
from distprune.files.ranking.searching import Cut, Found, Search, TensorCut
from distprune.files.ranking.streaming import Source, nan_error
from distprune.files.ranking.units import PruneUnit, units_by_rank
from distprune.files.selecting.grouping import check_budget
from distprune.files.team import Team


@dataclass(frozen=True)
class Decision:
    """The cuts of all groups, the same on every rank; ``Decision(**asdict(decision))`` is equal.

    Attributes:
        cuts: per group; None: its tensors are not ranked together, nothing of it goes, or limits
            decide all.
        quotas: per unit of pruning, how many of its ties go, the first ones.
        tensors: where each tensor in a group with limits is cut.
        num_nan: by name of a tensor that holds some, in groups that are ranked together.
    """

    cuts: tuple[Cut | None, ...]
    quotas: tuple[int, ...]
    tensors: tuple[TensorCut, ...]
    num_nan: dict[str, int]

    def __post_init__(self) -> None:  # of lists and mappings, as JSON has them
        cuts = (Cut(**cut) if isinstance(cut, Mapping) else cut for cut in self.cuts)
        tensors = (TensorCut(**t) if isinstance(t, Mapping) else t for t in self.tensors)
        for field, values in (("cuts", cuts), ("quotas", self.quotas), ("tensors", tensors)):
            object.__setattr__(self, field, tuple(values))


def decide(team: Team, plan: Plan, source: Source, units: Sequence[PruneUnit]) -> Decision:
    """Find where the ranking of each group is cut.

    Args:
        team: the ranks.
        plan: what is to be done.
        source: of the plan.
        units: of pruning, all.

    Raises:
        NaNError: a selected tensor holds NaN, and they are not to be kept; on every rank.
        SelectionError: more is to be pruned than there are numbers, or than limits allow without
            NaN; on every rank.
        CheckpointError: the source cannot be read; on every rank.

    Cost: one read for every 16 bits of a key of those groups that have so many, and for each group
    as many all-reduces of up to 512 KiB; no read for random scores; see :class:`LimitedSearch`
    for limits. Memory: the histograms of this rank's units.
    """
    deciding = _Deciding(team, plan, source, units)
    deciding.run()
    return deciding.decision()


def bytes_to_count(plan: Plan, source: Source, units: Sequence[PruneUnit]) -> int:
    """What :func:`decide` reads, over all ranks and passes."""
    num_passes = {
        number: source.group_format(number).width // 16 for number in _counted_groups(plan, source)
    }
    return sum(num_passes.get(unit.group, 0) * unit.num_bytes for unit in units)


def _counted_groups(plan: Plan, source: Source) -> list[int]:
    """The groups whose elements have to be counted before any of them can go."""
    # Even if nothing is to go, a NaN is to be found.
    return [
        number
        for number, group in enumerate(plan.groups)
        if group.recipe.is_together
        and (group.num_to_prune or source.needs_values(number) or group.has_limits)
    ]


class _Deciding:
    """The search in all groups that are ranked together, side by side."""

    def __init__(self, team: Team, plan: Plan, source: Source, units: Sequence[PruneUnit]) -> None:
        self._team = team
        self._plan = plan
        self._source = source
        self._units = units
        self._searches = self._begin()
        self._counts = np.zeros(len(plan.tensors), dtype=np.int64)
        self._num_nan = self._counts

    def run(self) -> None:
        total = bytes_to_count(self._plan, self._source, self._units)
        num_done, is_first = 0, True
        while unfinished := {n: s for n, s in self._searches.items() if not s.is_done}:
            numbered = [(i, u) for i, u in enumerate(self._units) if u.group in unfinished]
            mine = units_by_rank(numbered, self._team.size)[self._team.index]
            self._team.work(self._steps(mine), "count", num_done, total)
            num_done += sum(unit.num_bytes for _, unit in numbered)
            if is_first:
                self._agree_on_nan()
                is_first = False
            for search in unfinished.values():
                search.narrow()

    def decision(self) -> Decision:
        found: dict[int, Found] = {n: search.found() for n, search in self._searches.items()}
        cuts: list[Cut | None] = [None] * len(self._plan.groups)
        quotas = [0] * len(self._units)
        tensors: list[TensorCut] = []
        for number, each in found.items():
            if self._plan.groups[number].num_to_prune:
                cuts[number] = each.cut
                for unit, quota in each.quotas.items():
                    quotas[unit] = quota
            tensors += each.tensors
        num_nan = {
            tensor.entry.name: count
            for tensor, count in zip(self._plan.tensors, self._num_nan.tolist(), strict=True)
            if count
        }
        return Decision(tuple(cuts), tuple(quotas), tuple(tensors), num_nan)

    def _begin(self) -> dict[int, Search]:
        searches: dict[int, Search] = {}
        for number in _counted_groups(self._plan, self._source):
            group = self._plan.groups[number]
            numbers = [i for i, unit in enumerate(self._units) if unit.group == number]
            width = self._source.group_format(number).width
            what = (self._team, self._units, numbers, width)
            if group.has_limits:
                limited = LimitedSearch(*what, group.num_to_prune, self._plan, number)
                searches[number] = limited
            else:
                searches[number] = Search(*what, max(group.num_to_prune, 1))
        return searches

    def _steps(self, mine: Sequence[int]) -> Iterator[int]:
        """Count this rank's units; yields the bytes that were read."""
        source = self._source
        for number in mine:
            unit = self._units[number]
            search = self._searches[unit.group]
            counting = search.counting(number)
            key_format = source.group_format(unit.group)
            for span in unit.spans:
                chunks = source.chunks_of_keys(span.position, span.first, span.last)
                for keys, num_bytes in chunks:
                    if search.is_first:
                        self._counts[span.position] += key_format.count_nan(keys)
                    counting.add(span, keys)
                    yield num_bytes
                counting.end_span(span)
            counting.end_unit()

    def _agree_on_nan(self) -> None:
        """Raise on every rank if there are NaN and must be none, or too few numbers are left."""
        plan = self._plan
        self._num_nan = self._team.sum(torch.from_numpy(self._counts)).numpy()
        holders = [plan.tensors[i].entry.name for i in np.flatnonzero(self._num_nan).tolist()]
        if holders and plan.recipe.nan == "error":
            raise nan_error(holders)
        for number in self._searches:
            self._check_numbers(number)

    def _check_numbers(self, number: int) -> None:
        group = self._plan.groups[number]
        counts: Array = self._num_nan[group.first : group.last]
        if not counts.any():
            return
        num_numbers = group.num_elements - int(counts.sum())
        if group.num_to_prune > num_numbers:
            raise SelectionError(
                f"{group.num_to_prune} elements are to be pruned, but only {num_numbers} are no "
                "NaN, and NaN are kept. Lower the sparsity."
            )
        tensors = self._plan.tensors[group.first : group.last]
        highest = 0
        for tensor, count in zip(tensors, counts.tolist(), strict=True):
            most = min(tensor.highest, tensor.entry.numel - count)
            if most < tensor.lowest:
                raise SelectionError(
                    f"{tensor.entry.name}: min_sparsity {group.recipe.min_sparsity} prunes at "
                    f"least {tensor.lowest:,} elements, but only {most:,} are no NaN, and NaN are "
                    "kept. Lower min_sparsity, or exclude the tensor."
                )
            highest += most
        check_budget(group.num_to_prune, 0, highest, group.recipe)
