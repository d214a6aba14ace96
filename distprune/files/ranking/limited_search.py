"""The search for the cut of a group's ranking within limits of each tensor.

[Note: limits] Let tensor i lose at least low_i elements, and at most high_i. It loses its own
lowest elements, wherever the cut is; so its first low_i elements are pruned, those from the
high_i-th on are kept, and the cut decides on the free elements between them::

    elements of tensor i, in order    | pruned |      free       |     kept     |
                                      0      low_i             high_i         numel

The result is a cut of the order of all free elements, after k - sum(low_i) of them. This is what
``global_unstructured`` does with ``min_sparsity`` and ``max_sparsity``.

The histogram of a tensor's free elements is that of all its elements with the cumulative counts
clipped to [low_i, high_i]. So once a tensor is counted, its histogram is added to that of its
unit, and only four numbers of its own are stored: the bins of the floor and of the ceiling, and
the counts below these. When the bin of the cut is known, each tensor continues in one bin: that of
the cut or, if the cut is beyond its floor or its ceiling, that of the limit. Limits cost no read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from distprune._common.bounds import CEILING, FLOOR
from distprune.files.planning import Plan
from distprune.files.ranking.histograms import digit_histogram, narrowed
from distprune.files.ranking.keys import Array
from distprune.files.ranking.searching import Counting, Cut, Search, SearchResult, TensorCut
from distprune.files.ranking.units import PruneUnit, Span
from distprune.files.team import Team

_NO_CEILING = 1 << 62
_FREE, _FLOOR, _CEILING = range(3)
_LIMIT_NAMES = (None, FLOOR, CEILING)


class LimitedSearch(Search):
    """The search within the limits of each tensor; see [Note: limits].

    Args:
        team, units, numbers, width, k: as for :class:`Search`; ``k`` may be 0.
        plan: what is to be done.
        group: number of the group.

    Cost: as many reads as :class:`Search`; in each of them also an all-reduce of 32 bytes for
    each tensor, and one of at most 512 KiB for each tensor that is cut into several units.
    """

    def __init__(
        self,
        team: Team,
        units: Sequence[PruneUnit],
        numbers: Sequence[int],
        width: int,
        k: int,
        plan: Plan,
        group: int,
    ) -> None:
        members = plan.groups[group]
        tensors = plan.tensors[members.first : members.last]
        num_free = k - sum(tensor.lowest for tensor in tensors)
        super().__init__(team, units, numbers, width, max(num_free, 1))
        self._first = members.first
        self._sizes = np.array([tensor.entry.numel for tensor in tensors], dtype=np.int64)
        # Per tensor: the known bits of its own threshold; and of its elements with these bits, how
        # many have to be pruned at least, and at most.
        self._prefix = np.zeros(len(tensors), dtype=np.int64)
        self._low = np.array([tensor.lowest for tensor in tensors], dtype=np.int64)
        self._high = np.array([tensor.highest for tensor in tensors], dtype=np.int64)
        self._limit = np.full(len(tensors), _FREE)
        if not num_free:  # every tensor is pruned to its floor, and nothing is left to decide
            self._limit[:] = _FLOOR
            self._high = self._low.copy()
        # Per tensor, in this pass: the bins of its floor and ceiling, and the counts below these.
        self._bins = np.zeros((len(tensors), 4), dtype=np.int64)
        self._is_cut = num_free > 0
        self._digits: Array = np.zeros(0, dtype=np.int64)

    def digits_of(self, span: Span, keys: Array, counts: Array | None = None) -> Array:
        prefix = int(self._prefix[span.position - self._first])
        return digit_histogram(keys, prefix, self._descent.shift, counts)

    def counting(self, number: int) -> Counting:
        if self._is_part_unit(number):
            return super().counting(number)  # limits hold for the tensor, not for its part
        return _CountingTensors(self, number)

    def free_of(self, span: Span, histogram: Array) -> Array:
        """The histogram of a whole tensor's free elements, once the tensor has been counted."""
        return self._close(span.position - self._first, histogram)

    def narrow(self) -> None:
        self._bins = self._team.sum(torch.from_numpy(self._bins)).numpy()
        parts = dict(self._parts())
        rows = {n: row for n, row in self._rows.items() if not self._is_part_unit(n)}
        histogram = self._sum(rows)  # of free elements
        for position, numbers in parts.items():
            whole = self._sum({n: self._rows[n] for n in numbers if n in self._rows})
            histogram += self._close(position - self._first, whole)
        if self._is_cut:
            self._descent, digit = narrowed(self._descent, histogram)
        else:  # every tensor is held by its own limit, and needs as many passes
            self._descent, digit = self._descent.inside(0, 0), 0
        self._continue(digit)
        if self.is_done:
            self._count_ties(digit)
        self._rows.clear()
        self._bins = np.zeros_like(self._bins)

    def result(self) -> SearchResult:
        ties = self._team.sum(self._ties).tolist()
        quotas, num_ties = self._share_ties(dict(zip(self._numbers, ties, strict=True)))
        num_ties_pruned = self._num_ties_pruned
        cut = Cut(self._descent.low, num_ties, num_ties_pruned) if self._is_cut else None
        columns = (self._prefix, self._limit, self._low, self._high)
        tensors = [
            TensorCut(self._first + i, prefix, _LIMIT_NAMES[limit], low, high)
            for i, (prefix, limit, low, high) in enumerate(
                zip(*(column.tolist() for column in columns), strict=True)
            )
        ]
        return SearchResult(cut, quotas, tensors)

    @property
    def _num_ties_pruned(self) -> int:
        """How many of the ties that no limit decides on are pruned."""
        return self._descent.rank + 1 if self._is_cut else 0

    def _share_ties(self, by_unit: Mapping[int, int]) -> tuple[dict[int, int], int]:
        """The quota of each unit, and the number of ties that no limit decides on.

        Args:
            by_unit: the ties of every unit of the group.
        """
        num_left = self._num_ties_pruned
        num_ties = 0
        quotas: dict[int, int] = {}
        parts = dict(self._parts())
        for number in self._numbers:
            if not self._is_part_unit(number):
                num_ties += by_unit[number]
                quotas[number] = min(by_unit[number], num_left)
                num_left -= quotas[number]
                continue
            if number in quotas:
                continue
            position = self._units[number].spans[0].position
            numbers, i = parts[position], position - self._first
            quota = int(self._low[i])  # of all parts of the tensor together
            if self._limit[i] == _FREE:
                num_free = min(sum(by_unit[n] for n in numbers), int(self._high[i])) - quota
                num_ties += num_free
                quota += min(num_free, num_left)
                num_left -= min(num_free, num_left)
            for n in numbers:
                quotas[n] = min(by_unit[n], quota)
                quota -= quotas[n]
        return quotas, num_ties

    def _close(self, i: int, histogram: Array) -> Array:
        """Store the bins of a tensor's limits; returns the histogram of its free elements.

        NaN come last in the order. None is pruned if there are enough numbers, which is checked.
        """
        low, high = int(self._low[i]), int(self._high[i])
        cumulative = np.cumsum(histogram)
        self._bins[i] = (*_bin_of(cumulative, low), *_bin_of(cumulative, high))
        if self._limit[i] != _FREE:
            return np.zeros_like(histogram)
        return np.diff(np.clip(cumulative, low, high), prepend=low)

    def _continue(self, digit: int) -> None:
        """Continue each tensor in one bin: that of the cut, or of the limit that holds it."""
        floor, below_floor, ceiling, below_ceiling = self._bins.T
        is_free = self._limit == _FREE
        at_floor = (self._limit == _FLOOR) | (is_free & (floor > digit))
        at_ceiling = (self._limit == _CEILING) | (is_free & (ceiling < digit))
        at_cut = ~(at_floor | at_ceiling)
        self._limit = np.where(at_floor, _FLOOR, np.where(at_ceiling, _CEILING, _FREE))
        own = np.where(at_floor, floor, np.where(at_ceiling, ceiling, digit))
        self._digits = np.maximum(own, 0)  # -1: nothing of the tensor goes
        self._prefix = (self._prefix << 16) | self._digits
        low = np.where(at_cut & (floor < digit), 0, self._low - below_floor)
        high = np.where(at_cut & (ceiling > digit), _NO_CEILING, self._high - below_ceiling)
        self._low = np.where(at_ceiling, high, low)
        self._high = np.where(at_floor, low, high)

    def _count_ties(self, digit: int) -> None:
        """Count the ties of each unit of this rank."""
        for index, number in enumerate(self._numbers):
            if number in self._rows:
                if self._is_part_unit(number):
                    i = self._units[number].spans[0].position - self._first
                    self._ties[index] = int(self._rows[number][self._digits[i]])
                else:
                    self._ties[index] = int(self._rows[number][digit])

    def _parts(self) -> Iterator[tuple[int, list[int]]]:
        """The tensors that are cut into several units, and the numbers of these."""
        units_of: dict[int, list[int]] = {}
        for number in self._numbers:
            if self._is_part_unit(number):
                units_of.setdefault(self._units[number].spans[0].position, []).append(number)
        yield from units_of.items()

    def _is_part(self, span: Span) -> bool:
        return span.last - span.first < int(self._sizes[span.position - self._first])

    def _is_part_unit(self, number: int) -> bool:
        return self._is_part(self._units[number].spans[0])


class _CountingTensors(Counting):
    """Counts a unit of whole tensors: each is closed when it has been counted."""

    def __init__(self, search: LimitedSearch, number: int) -> None:
        super().__init__(search, number)
        self._limited = search
        self._histogram = np.zeros(search.num_bins, dtype=np.int64)

    def add(self, span: Span, keys: Array, counts: Array | None = None) -> None:
        self._histogram += self._limited.digits_of(span, keys, counts)

    def end_span(self, span: Span) -> None:
        self._row += self._limited.free_of(span, self._histogram)
        self._histogram[:] = 0


def _bin_of(cumulative: Array, count: int) -> tuple[int, int]:
    """The bin of the ``count``-th element, from 1 on, and how many elements are below that bin.

    Bin -1 if count is 0; the number of bins if there are fewer elements.
    """
    if count <= 0:
        return -1, 0
    number = int(np.searchsorted(cumulative, count - 1, side="right"))
    return number, int(cumulative[number - 1]) if number else 0
