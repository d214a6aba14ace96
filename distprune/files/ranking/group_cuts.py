"""Where the ranking of each group is cut: found exactly, in one read of 16-bit weights.

All groups are counted in the same read. Each pass makes a histogram of sixteen bits of the keys for
each unit; their sum over all units and ranks decides these bits. The histogram of a unit's last
sixteen bits has the number of its ties at the threshold, so ties need no further read::

    units of this rank    |0    |1    |2    |      a histogram for each
    all ranks             |  all-reduced sum |  -> bin of the k-th key -> next sixteen bits

Groups that are normalised are measured first. Their weights of 16 bits are tallied in that read,
and not read again to be counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from distprune.files.errors import SelectionError
from distprune.files.planning import Plan
from distprune.files.ranking.keys import Array
from distprune.files.ranking.limited_search import LimitedSearch
from distprune.files.ranking.measuring import (
    Measured,
    bytes_to_measure,
    measure,
    normalized_units,
)
from distprune.files.ranking.searching import Counting, Cut, Search, TensorCut
from distprune.files.ranking.streaming import Source, nan_error
from distprune.files.ranking.tallies import Tallies
from distprune.files.ranking.units import PruneUnit, Span, units_by_rank
from distprune.files.selecting.grouping import check_budget
from distprune.files.team import Team


@dataclass(frozen=True)
class GroupCuts:
    """Where all groups are cut, the same on every rank.

    Attributes:
        cuts: per group; None: its tensors are not ranked together, nothing of it is pruned, or
            limits decide everything.
        quotas: per unit of pruning, how many of its ties are pruned, the first ones.
        tensors: where each tensor in a group with limits is cut.
        num_nan: by name of a tensor that has NaN, in groups that are ranked together.
        divisors: per tensor, what its magnitudes are divided by; None: by nothing. Empty if that
            holds for all.
    """

    cuts: tuple[Cut | None, ...]
    quotas: tuple[int, ...]
    tensors: tuple[TensorCut, ...]
    num_nan: dict[str, int]
    divisors: tuple[float | None, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> GroupCuts:
        """The cuts whose ``asdict`` was written as JSON."""
        return cls(
            cuts=tuple(None if cut is None else Cut(**cut) for cut in values["cuts"]),
            quotas=tuple(values["quotas"]),
            tensors=tuple(TensorCut(**tensor) for tensor in values["tensors"]),
            num_nan=values["num_nan"],
            divisors=tuple(values.get("divisors", ())),
        )


def find_cuts(team: Team, plan: Plan, source: Source, units: Sequence[PruneUnit]) -> GroupCuts:
    """Find where the ranking of each group is cut.

    Args:
        team: the ranks.
        plan: what to do.
        source: of the plan; ranks normalised scores from now on, where the plan says so.
        units: all units of pruning.

    Raises:
        NaNError: a selected tensor has NaN, and the recipe does not keep them; on every rank.
        SelectionError: more is to be pruned than there are numbers, or than limits allow without
            NaN; on every rank.
        CheckpointError: the source cannot be read, or a tensor that is normalised has infinite
            elements; on every rank.

    Cost: one read of a group for every 16 bits of its keys, and as many all-reduces of up to
    512 KiB for each group; no read for random scores; see :class:`LimitedSearch` for limits.
    If normalised: one read of weights of 16 bits in all, and one to two more of others.
    Memory: the histograms of this rank's units, and tallies of up to 48 MiB.
    """
    searching = _Searching(team, plan, source, units)
    searching.run()
    return searching.group_cuts()


def bytes_to_count(plan: Plan, source: Source, units: Sequence[PruneUnit]) -> int:
    """How many bytes :func:`find_cuts` reads, over all ranks and passes."""
    num_passes = {
        number: source.group_format(number).width // 16 for number in _counted_groups(plan, source)
    }
    num_bytes = sum(
        num_passes.get(unit.group, 0) * _bytes_of_a_pass(plan, source, unit) for unit in units
    )
    return bytes_to_measure(plan, units) + num_bytes


def _bytes_of_a_pass(plan: Plan, source: Source, unit: PruneUnit) -> int:
    """How many bytes of a unit are read to count it once, if it is to be counted."""
    if plan.groups[unit.group].recipe.normalize is None:
        return unit.num_bytes
    return sum(
        (span.last - span.first) * source.itemsize(span.position)
        for span in unit.spans
        if source.raw_itemsize(span.position) > 2
    )


def _counted_groups(plan: Plan, source: Source) -> list[int]:
    """The groups whose elements have to be counted before any of them can be pruned."""
    # Even if nothing is pruned, a NaN has to be found.
    return [
        number
        for number, group in enumerate(plan.groups)
        if group.recipe.is_together
        and (group.num_to_prune or source.needs_values(number) or group.has_limits)
    ]


class _Searching:
    """The search in all groups that are ranked together, side by side."""

    def __init__(self, team: Team, plan: Plan, source: Source, units: Sequence[PruneUnit]) -> None:
        self._team = team
        self._plan = plan
        self._source = source
        self._units = units
        self._searches = self._begin()
        self._tallies = Tallies(source)
        self._measured = Measured((), np.zeros(len(plan.tensors), dtype=np.int64))
        self._counts = np.zeros(len(plan.tensors), dtype=np.int64)
        self._num_nan = self._counts

    def run(self) -> None:
        plan, team, units = self._plan, self._team, self._units
        total = bytes_to_count(plan, self._source, units)
        num_done, is_first = bytes_to_measure(plan, units), True
        if any(group.recipe.normalize is not None for group in plan.groups):
            refuse_nan = plan.recipe.nan == "error"
            what = (team, plan, units, self._tallies)
            self._measured = measure(*what, "count", total, refuse_nan=refuse_nan)
            self._source.normalize(self._measured.divisors)
        tallied = normalized_units(plan, units, team)
        while unfinished := {n: s for n, s in self._searches.items() if not s.is_done}:
            counted = [(i, u) for i, u in enumerate(units) if u.group in unfinished]
            others = [(i, u) for i, u in counted if not self._is_normalized(u.group)]
            mine = [i for i in tallied if units[i].group in unfinished]
            mine += units_by_rank(others, team.size)[team.index]
            team.work(self._steps(mine), "count", num_done, total)
            num_done += sum(_bytes_of_a_pass(plan, self._source, unit) for _, unit in counted)
            if is_first:
                self._agree_on_nan()
                is_first = False
            for search in unfinished.values():
                search.narrow()

    def group_cuts(self) -> GroupCuts:
        results = {number: search.result() for number, search in self._searches.items()}
        cuts: list[Cut | None] = [None] * len(self._plan.groups)
        quotas = [0] * len(self._units)
        tensors: list[TensorCut] = []
        for number, result in results.items():
            if self._plan.groups[number].num_to_prune:
                cuts[number] = result.cut
                for unit, quota in result.quotas.items():
                    quotas[unit] = quota
            tensors += result.tensors
        num_nan = {
            tensor.entry.name: count
            for tensor, count in zip(self._plan.tensors, self._num_nan.tolist(), strict=True)
            if count
        }
        divisors = self._measured.divisors
        return GroupCuts(tuple(cuts), tuple(quotas), tuple(tensors), num_nan, divisors)

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
                k = group.num_to_prune // group.recipe.group_rule.tile_size
                searches[number] = Search(*what, max(k, 1))
        return searches

    def _steps(self, mine: Sequence[int]) -> Iterator[int]:
        """Count this rank's units; yields the bytes that were read."""
        for number in mine:
            unit = self._units[number]
            counting = self._searches[unit.group].counting(number)
            for span in unit.spans:
                if self._is_normalized(unit.group):
                    yield from self._count_normalized(span, counting)
                else:
                    yield from self._count(unit.group, span, counting)
                counting.end_span(span)
            counting.end_unit()

    def _count(self, group: int, span: Span, counting: Counting) -> Iterator[int]:
        key_format = self._source.group_format(group)
        items = self._source.items_of(span.position, span.first, span.last)
        chunks = self._source.chunks_of_keys(span.position, *items)
        for keys, num_bytes in chunks:
            if self._searches[group].is_first:
                self._counts[span.position] += key_format.count_nan(keys)
            counting.add(span, keys)
            yield num_bytes

    def _count_normalized(self, span: Span, counting: Counting) -> Iterator[int]:
        scale = self._source.scale_of(span.position)
        assert scale is not None
        for weights, num_bytes in self._tallies.read(span):
            if weights is not None:
                counting.add(span, scale.score_keys(weights.bits), weights.counts)
            yield num_bytes

    def _is_normalized(self, group: int) -> bool:
        return self._plan.groups[group].recipe.normalize is not None

    def _agree_on_nan(self) -> None:
        """Raise on every rank if there are NaN and must be none, or too few numbers are left."""
        plan = self._plan
        counts = self._team.sum(torch.from_numpy(self._counts)).numpy()
        self._num_nan = counts + self._measured.num_nan
        holders = np.flatnonzero(self._num_nan).tolist()
        if holders and plan.recipe.nan == "error":
            raise nan_error(plan, holders)
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
