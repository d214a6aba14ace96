"""The search for the cut of a group's ranking within limits of each tensor.

[Note: limits] Let tensor i have to lose at least low_i elements, and at most high_i. It loses its
own lowest ones, whatever the cut is; so its first low_i elements go, those from the high_i-th on
stay, and the cut decides on those between: the free ones. The result is the cut of the order of all
free elements after k - sum(low_i) of them. This is what ``global_unstructured`` makes with
``min_sparsity`` and ``max_sparsity``.

The histogram of a tensor's free elements is that of all its elements with the cumulative counts
clipped to [low_i, high_i]. So once a tensor is counted, its histogram is added to that of its
unit, and only four numbers of its own are kept: in which bins the floor and the ceiling are, and
what is below these. When the bin of the cut is known, each tensor has one bin to go on with: that
of the cut, or, if the cut is beyond its floor or its ceiling, the bin of that. Limits cost no read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from distprune.files.planning import Plan
from distprune.files.ranking.scores import Array, digit_histogram, narrowed
from distprune.files.ranking.searching import Counting, Cut, Found, Search, TensorCut
from distprune.files.ranking.units import PruneUnit, Span
from distprune.files.team import Team

_NO_CEILING = 1 << 62
_FREE, _FLOOR, _CEILING = range(3)
_HELD_AT = (None, "min_sparsity", "max_sparsity")


class LimitedSearch(Search):
    """The same within the limits of each tensor; see [Note: limits].

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
        # Of each tensor: the bits that are known of its own threshold; and, of its elements with
        # these bits, how many have to go, and how many may.
        self._prefix = np.zeros(len(tensors), dtype=np.int64)
        self._low = np.array([tensor.lowest for tensor in tensors], dtype=np.int64)
        self._high = np.array([tensor.highest for tensor in tensors], dtype=np.int64)
        self._held = np.full(len(tensors), _FREE)
        if not num_free:  # every tensor loses what it has to, and nothing is left to decide
            self._held[:] = _FLOOR
            self._high = self._low.copy()
        # Of each tensor in this pass: the bins of its floor and ceiling, and what is below these.
        self._bins = np.zeros((len(tensors), 4), dtype=np.int64)
        self._is_cut = num_free > 0
        self._digits: Array = np.zeros(0, dtype=np.int64)

    def digits_of(self, span: Span, keys: Array) -> Array:
        prefix = int(self._prefix[span.position - self._first])
        return digit_histogram(keys, prefix, self._descent.shift)

    def counting(self, number: int) -> Counting:
        if self._is_part_unit(number):
            return super().counting(number)  # limits hold for the tensor: others count the rest
        return _CountingTensors(self, number)

    def free_of(self, span: Span, histogram: Array) -> Array:
        """A whole tensor has been counted: the histogram of its free elements."""
        return self._close(span.position - self._first, histogram)

    def narrow(self) -> None:
        self._bins = self._team.sum(torch.from_numpy(self._bins)).numpy()
        parts = dict(self._parts())
        rows = {n: row for n, row in self._rows.items() if not self._is_part_unit(n)}
        free = self._sum(rows)
        for position, numbers in parts.items():
            whole = self._sum({n: self._rows[n] for n in numbers if n in self._rows})
            free += self._close(position - self._first, whole)
        if self._is_cut:
            self._descent, digit = narrowed(self._descent, free)
        else:  # every tensor is held by its own limit, and needs as many passes
            self._descent, digit = self._descent.inside(0, 0), 0
        self._go_on(digit)
        if self.is_done:
            self._count_ties(digit)
        self._rows.clear()
        self._bins = np.zeros_like(self._bins)

    def found(self) -> Found:
        ties = self._team.sum(self._ties).tolist()
        by_unit = dict(zip(self._numbers, ties, strict=True))
        left = wanted = self._descent.rank + 1 if self._is_cut else 0
        quotas: dict[int, int] = {}
        num_ties = 0
        parts = dict(self._parts())
        for number in self._numbers:
            if not self._is_part_unit(number):
                num_ties += by_unit[number]
                quotas[number] = min(by_unit[number], left)
                left -= quotas[number]
                continue
            if number in quotas:
                continue
            position = self._units[number].spans[0].position
            numbers, i = parts[position], position - self._first
            going = int(self._low[i])
            if self._held[i] == _FREE:
                total = sum(by_unit[n] for n in numbers)
                num_free = min(total, int(self._high[i])) - going
                num_ties += num_free
                going += min(num_free, left)
                left -= min(num_free, left)
            for n in numbers:
                quotas[n] = min(by_unit[n], going)
                going -= quotas[n]
        cut = Cut(self._descent.low, num_ties, wanted) if self._is_cut else None
        columns = (self._prefix.tolist(), self._held.tolist(), self._low.tolist())
        tensors = [
            TensorCut(self._first + i, prefix, _HELD_AT[held], low, high)
            for i, (prefix, held, low, high) in enumerate(
                zip(*columns, self._high.tolist(), strict=True)
            )
        ]
        return Found(cut, quotas, tensors)

    def _close(self, i: int, histogram: Array) -> Array:
        """All of a tensor is counted: note the bins of its limits; the histogram of what is free.

        NaN come last in the order. If there are numbers enough, as is checked before, none goes.
        """
        low, high = int(self._low[i]), int(self._high[i])
        upto = np.cumsum(histogram)
        self._bins[i] = (*_bin_of(upto, low), *_bin_of(upto, high))
        if self._held[i] != _FREE:
            return np.zeros_like(histogram)
        return np.diff(np.clip(upto, low, high), prepend=low)

    def _go_on(self, digit: int) -> None:
        """Each tensor goes on in one bin: that of the cut, or of the limit that holds it."""
        floor, below_floor, ceiling, below_ceiling = self._bins.T
        is_free = self._held == _FREE
        at_floor = (self._held == _FLOOR) | (is_free & (floor > digit))
        at_ceiling = (self._held == _CEILING) | (is_free & (ceiling < digit))
        at_cut = ~(at_floor | at_ceiling)
        self._held = np.where(at_floor, _FLOOR, np.where(at_ceiling, _CEILING, _FREE))
        own = np.where(at_floor, floor, np.where(at_ceiling, ceiling, digit))
        self._digits = np.maximum(own, 0)  # -1: nothing of the tensor goes
        self._prefix = (self._prefix << 16) | self._digits
        low = np.where(at_cut & (floor < digit), 0, self._low - below_floor)
        high = np.where(at_cut & (ceiling > digit), _NO_CEILING, self._high - below_ceiling)
        self._low = np.where(at_ceiling, high, low)
        self._high = np.where(at_floor, low, high)

    def _count_ties(self, digit: int) -> None:
        """Per unit of this rank, how many ties there are to choose among."""
        for place, number in enumerate(self._numbers):
            if number in self._rows:
                if self._is_part_unit(number):
                    i = self._units[number].spans[0].position - self._first
                    self._ties[place] = int(self._rows[number][self._digits[i]])
                else:
                    self._ties[place] = int(self._rows[number][digit])

    def _parts(self) -> Iterator[tuple[int, list[int]]]:
        """The tensors that are cut into several units, and these."""
        found: dict[int, list[int]] = {}
        for number in self._numbers:
            if self._is_part_unit(number):
                found.setdefault(self._units[number].spans[0].position, []).append(number)
        yield from found.items()

    def _is_part(self, span: Span) -> bool:
        return span.last - span.first < self._sizes[span.position - self._first]

    def _is_part_unit(self, number: int) -> bool:
        return self._is_part(self._units[number].spans[0])


class _CountingTensors(Counting):
    """A unit of whole tensors: each is closed when it has been counted."""

    def __init__(self, search: LimitedSearch, number: int) -> None:
        super().__init__(search, number)
        self._limited = search
        self._histogram = np.zeros(search.num_bins, dtype=np.int64)

    def add(self, span: Span, keys: Array) -> None:
        self._histogram += self._limited.digits_of(span, keys)

    def end_span(self, span: Span) -> None:
        self._row += self._limited.free_of(span, self._histogram)
        self._histogram[:] = 0


def _bin_of(upto: Array, count: int) -> tuple[int, int]:
    """In which bin the ``count``-th element is, from 1 on, and how many are below that bin.

    Bin -1 for none; the number of bins if there are not so many.
    """
    if count <= 0:
        return -1, 0
    place = int(np.searchsorted(upto, count - 1, side="right"))
    return place, int(upto[place - 1]) if place else 0
