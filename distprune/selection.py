"""Exact selection over all ranks: find where the total order is cut after k elements.

The order is (key of the score, position of the parameter in the caller's list,
row-major index in the whole parameter). Ranks exchange counts and histograms,
never scores:

1. a sample brackets the k-th key;
2. one read counts the keys around the bracket and collects those inside it;
3. the k-th key is radix-selected among the collected ones;
4. the ties at that key are cut by parameter, then by index, the same way.

The sample decides how fast this is, not what comes out: when the bracket misses,
the next round brackets inside the interval that two exact counts leave. Nothing is
written here.

Source: sampled bracket after Floyd and Rivest, "Expected time bounds for
selection", CACM 1975; radix descent after Alabi et al., "Fast k-selection
algorithms for graphics processing units", JEA 2012.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from distprune.collectives import Communicator
from distprune.keys import KeyRange
from distprune.passes import Candidates, Cut, count_and_collect, indices_at, sample

T = TypeVar("T")

# A search yields int64 tensors, 1-d, and is sent their sums over all ranks.
Search = Generator[Tensor, Tensor, T]

_BINS_LOG2 = 11
# One more than a power of two: an interval need not start at a bin's edge.
_BINS = (1 << _BINS_LOG2) + 1
# A bracket this many standard deviations wide misses about once in a million.
_SIGMAS = 5.0
# Up to so many elements in all are collected outright: a sample would not pay.
_COLLECT_ALL = 1 << 16
# A bracket of so few keys is counted key by key, without collecting (16-bit dtypes).
_FEW_KEYS = 6


@dataclass(frozen=True)
class Selection:
    """What was selected: a cut, and facts about it that all ranks share.

    Attributes:
        cut: where the total order is cut.
        num_ties: elements whose key equals the threshold; ...
        num_ties_pruned: ... and how many of them come before the cut.
    """

    cut: Cut
    num_ties: int
    num_ties_pruned: int


def select_lowest(
    parts: Sequence[Candidates],
    names: Sequence[str],
    num_live: Sequence[int],
    k: int,
    keys: KeyRange,
    communicator: Communicator,
    *,
    refuse_nan: bool,
) -> Selection:
    """Cut the total order of all live elements after exactly ``k`` of them.

    Args:
        parts: this rank's part of every parameter, in the same order on all ranks.
        names: of the parameters, for messages.
        num_live: live elements of every whole parameter.
        k: elements before the cut, 0 <= k <= sum(num_live).
        keys: the range of all keys.
        communicator: the ranks that hold the parts.
        refuse_nan: raise on a live NaN, on every rank; otherwise NaN rank last.

    Raises:
        ValueError: a live score is NaN; names its parameters.
        RuntimeError: the scores changed while they were read.

    Cost: one read of the scores (more when a bracket misses) and about ten
    all-reduces of up to 32 KiB; memory for the collected keys, about 0.5 % of
    them at 10**8 elements and less above.
    """
    search = search_lowest(parts, names, num_live, k, keys, refuse_nan=refuse_nan)
    return search_together([search], communicator)[0]


def search_together(searches: Sequence[Search[T]], communicator: Communicator) -> list[T]:
    """Run searches side by side, on every rank the same ones; their results.

    What all of them want summed goes into one all-reduce.
    """
    results: dict[int, T] = {}
    sums: dict[int, Tensor | None] = dict.fromkeys(range(len(searches)))
    while sums:
        wanted: dict[int, Tensor] = {}
        for which, shared in sums.items():
            try:
                # A generator is started by sending None.
                wanted[which] = searches[which].send(shared)  # type: ignore[arg-type]
            except StopIteration as finished:
                results[which] = finished.value
        if not wanted:
            break
        sizes = [values.numel() for values in wanted.values()]
        flat = communicator.sum(torch.cat(list(wanted.values())))
        sums = dict(zip(wanted, flat.split(sizes), strict=True))
    return [results[which] for which in range(len(searches))]


def search_lowest(
    parts: Sequence[Candidates],
    names: Sequence[str],
    num_live: Sequence[int],
    k: int,
    keys: KeyRange,
    *,
    refuse_nan: bool,
) -> Search[Selection]:
    """:func:`select_lowest` as a search that can run beside others."""
    if k == 0 and not (refuse_nan and keys.is_float):
        return Selection(Cut(keys.low, 0, 0), 0, 0)
    search = _Search(parts, names, num_live, keys, refuse_nan)
    threshold, num_below, ties_per_part = yield from search.find(min(max(k, 1), sum(num_live)))
    if k == 0:
        return Selection(Cut(keys.low, 0, 0), 0, 0)
    ties = yield torch.tensor(ties_per_part, dtype=torch.int64)
    num_ties, wanted = int(ties.sum()), k - num_below
    if wanted == num_ties:
        cut = Cut(threshold, len(parts), 0)
    else:
        cumulative = ties.cumsum(0)
        position = int(torch.searchsorted(cumulative, wanted))
        wanted_here = wanted - (int(cumulative[position - 1]) if position else 0)
        index = yield from _cut_ties(parts[position], threshold, wanted_here)
        cut = Cut(threshold, position, index)
    return Selection(cut, num_ties, wanted)


@dataclass
class _Search:
    """The search for the k-th key: an interval of keys that shrinks around it."""

    parts: Sequence[Candidates]
    names: Sequence[str]
    num_live: Sequence[int]
    keys: KeyRange
    refuse_nan: bool
    # Local live keys <= a pivot, per part, for every pivot counted so far.
    local_counts: dict[int, list[int]] = field(default_factory=dict)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def find(self, k: int) -> Search[tuple[int, int, list[int]]]:
        """The k-th key (1-based), how many are smaller, and this rank's ties per part."""
        keys, total = self.keys, sum(self.num_live)
        # The k-th key lies in [low, high].
        low, high = keys.low, keys.largest_number if self.refuse_nan else keys.high
        below, upto = 0, total  # keys < low, keys <= high
        if total == 0:
            return low, 0, [0] * len(self.parts)
        self.local_counts[low - 1] = [0] * len(self.parts)
        num_rounds = 0
        while high > low:
            inside = upto - below
            if inside <= _COLLECT_ALL:
                pivots, interval = set(), (low, high)
            else:
                bracket = self._bracket(k - below, inside, low, high, num_rounds)
                pivots, interval = yield from bracket
            if num_rounds == 0 and self.refuse_nan and keys.is_float:
                pivots = pivots | {high}
            counts, histogram, collected = yield from self._read(sorted(pivots), interval)
            if counts.get(keys.largest_number, total) < total and self.refuse_nan:
                yield from self._raise_nan()
            edges = sorted({low - 1: below, **counts, high: upto}.items())
            holding = [
                (start, less, end, count)
                for (start, less), (end, count) in itertools.pairwise(edges)
                if less < k <= count
            ]
            if len(holding) != 1:
                raise _changed()
            start, less, end, count = holding[0]
            if interval is not None and interval[0] - 1 <= start and end <= interval[1]:
                return (
                    yield from self._descend(
                        k - less, start + 1, end, less, histogram, interval, collected
                    )
                )
            low, high, below, upto = start + 1, end, less, count
            num_rounds += 1
        at, under = self._local(low), self._local(low - 1)
        return low, below, [a - b for a, b in zip(at, under, strict=True)]

    def _local(self, pivot: int) -> list[int]:
        if pivot not in self.local_counts:
            self.local_counts[pivot] = count_and_collect(
                self.parts, [pivot], None, self.keys.high + 1
            )[0]
            self.local_counts[pivot] = [row[0] for row in self.local_counts[pivot]]
        return self.local_counts[pivot]

    def _bracket(
        self, k: int, inside: int, low: int, high: int, num_rounds: int
    ) -> Search[tuple[set[int], tuple[int, int] | None]]:
        """Pivots around the k-th of the ``inside`` keys in [low, high], and what to collect.

        The same on every rank: everything is decided by summed histograms.
        """
        total = sum(part.numel for part in self.parts)
        # 4 n^(2/3) balances the cost of the sample and of the keys that it leaves.
        rate = min(1.0, max(4096.0, 4 * total ** (2 / 3)) * 2**num_rounds / total)
        drawn = [
            sample(part, math.ceil(len(part.counted) * rate), self.generator) for part in self.parts
        ]
        keys = _within(_concatenate(drawn), low, high)
        histogram = yield _histogram(keys, low, high)
        size = int(histogram.sum())
        if size == 0:
            return _eight_pivots(low, high), None
        centre = k / inside * size
        margin = _SIGMAS * math.sqrt(max(centre * (1 - centre / size), 0.0)) + 4
        pivots: set[int] = set()
        first, last = low, high  # the interval to collect
        for rank, is_lower in ((centre - margin, True), (centre + margin, False)):
            rank = math.floor(rank) if is_lower else math.ceil(rank)
            if not 0 <= rank < size:
                continue
            key, num_equal = yield from self._order_statistic(
                keys, histogram, rank, low, high, margin / 5
            )
            # A key that holds much of the sample is counted, not collected.
            heavy = key[0] == key[1] and num_equal > max(0.01 * size, margin / 5)
            if is_lower:
                pivots.add(key[0] - 1)
                first = key[0]
                if heavy:
                    pivots.add(key[1])
                    first = key[1] + 1
            else:
                pivots.add(key[1])
                last = key[1]
                if heavy:
                    pivots.add(key[0] - 1)
                    last = key[0] - 1
        if last - first < _FEW_KEYS:
            pivots |= set(range(first - 1, last + 1))
            interval = None
        else:
            interval = (first, last)
        pivots = {pivot for pivot in pivots if low <= pivot < high}
        if not pivots and inside > max(_COLLECT_ALL, total // 20):
            return _eight_pivots(low, high), None
        return pivots, interval

    def _order_statistic(
        self, keys: Tensor, histogram: Tensor, rank: int, low: int, high: int, tolerance: float
    ) -> Search[tuple[tuple[int, int], int]]:
        """An interval of keys that holds the sample's rank-th key and little else."""
        while True:
            low, high, rank, count = _descend_once(histogram, rank, low, high)
            if high == low or count <= tolerance:
                return (low, high), count
            keys = _within(keys, low, high)
            histogram = yield _histogram(keys, low, high)

    def _read(
        self, pivots: list[int], interval: tuple[int, int] | None
    ) -> Search[tuple[dict[int, int], Tensor, list[Tensor]]]:
        """One pass; global counts per pivot, and the histogram of the collected keys."""
        local, collected = count_and_collect(self.parts, pivots, interval, self.keys.high + 1)
        for j, pivot in enumerate(pivots):
            self.local_counts[pivot] = [row[j] for row in local]
        shared = torch.tensor(
            [sum(self.local_counts[pivot]) for pivot in pivots], dtype=torch.int64
        )
        if interval is not None:
            shared = torch.cat([shared, _histogram(_concatenate(collected), *interval)])
        shared = yield shared
        counts = dict(zip(pivots, shared.tolist(), strict=False))
        return counts, shared[len(pivots) :], collected

    def _descend(
        self,
        k: int,
        low: int,
        high: int,
        below: int,
        histogram: Tensor,
        interval: tuple[int, int],
        collected: list[Tensor],
    ) -> Search[tuple[int, int, list[int]]]:
        """Radix-select the k-th of the collected keys in [low, high]."""
        keys = _concatenate(collected)
        rank = k - 1
        if (low, high) != interval:
            keys = _within(keys, low, high)
            histogram = yield _histogram(keys, low, high)
        while True:
            low, high, rank, _ = _descend_once(histogram, rank, low, high)
            if low == high:
                break
            keys = _within(keys, low, high)
            histogram = yield _histogram(keys, low, high)
        ties = [int((found == low).sum()) for found in collected]
        return low, below + k - 1 - rank, ties

    def _raise_nan(self) -> Search[None]:
        """Name the parameters; every rank knows that there are NaN."""
        numbers = self.local_counts[self.keys.largest_number]
        not_nan = (yield torch.tensor(numbers, dtype=torch.int64)).tolist()
        where = [
            f"{name} ({live - count} of {live})"
            for name, live, count in zip(self.names, self.num_live, not_nan, strict=True)
            if count < live
        ]
        raise ValueError(
            f"the scores of {', '.join(where)} are NaN; expected numbers for every unpruned "
            "element. NaN has no place in a ranking: repair the weights, or mask them first "
            "with custom_from_mask."
        )


def _cut_ties(part: Candidates, key: int, wanted: int) -> Search[int]:
    """The global index below which exactly ``wanted`` elements of a parameter have a key.

    Radix selection over the index, of the ties alone; one read of this parameter,
    or two when there are more ties than are kept.
    """
    low, high, rank = 0, part.numel - 1, wanted - 1
    held: Tensor | None = None
    while low < high:
        histogram = torch.zeros(_BINS, dtype=torch.int64)
        if held is None:
            kept, num_found = [], 0
            for found in indices_at(part, key, low, high + 1):
                histogram += _histogram(found, low, high)
                num_found += found.numel()
                # Many ties are found again in the next round, when most are out of range.
                if num_found <= _COLLECT_ALL:
                    kept.append(found)
            if num_found <= _COLLECT_ALL:
                held = _concatenate(kept)
        else:
            held = _within(held, low, high)
            histogram = _histogram(held, low, high)
        low, high, rank, _ = _descend_once((yield histogram), rank, low, high)
    return low + 1


def _eight_pivots(low: int, high: int) -> set[int]:
    """Without information: split the keys themselves."""
    step = max(1, (high - low + 1) // 8)
    return {low + step * i - 1 for i in range(1, 8) if low <= low + step * i - 1 < high}


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Of one dtype, which empty tensors do not decide."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    return torch.cat(filled) if filled else torch.empty(0, dtype=torch.int64)


def _within(keys: Tensor, low: int, high: int) -> Tensor:
    if keys.numel() == 0:
        return keys
    raw = keys.numpy()
    return torch.from_numpy(raw[(raw >= low) & (raw <= high)])


def _bin_shift(low: int, high: int) -> int:
    return max(0, (high - low).bit_length() - _BINS_LOG2)


def _histogram(keys: Tensor, low: int, high: int) -> Tensor:
    """int64 [2049] counts of keys that all lie in [low, high]."""
    if keys.numel() == 0:
        return torch.zeros(_BINS, dtype=torch.int64)
    # Signed keys of a whole dtype would overflow when shifted down to zero.
    offset = (keys >> _bin_shift(low, high)).long() - (low >> _bin_shift(low, high))
    return torch.bincount(offset, minlength=_BINS)


def _descend_once(histogram: Tensor, rank: int, low: int, high: int) -> tuple[int, int, int, int]:
    """Step into the bin that holds a rank: its keys, the rank inside it, its count."""
    cumulative = histogram.cumsum(0)
    if not 0 <= rank < int(cumulative[-1]):
        raise _changed()
    which = int(torch.searchsorted(cumulative, rank, right=True))
    shift = _bin_shift(low, high)
    start = ((low >> shift) + which) << shift
    before = int(cumulative[which - 1]) if which else 0
    return (
        max(low, start),
        min(high, start + (1 << shift) - 1),
        rank - before,
        int(histogram[which]),
    )


def _changed() -> RuntimeError:
    return RuntimeError(
        "the counts of the scores disagree between two reads; expected scores that do not "
        "change during the call. Stop asynchronous updates, and make score functions pure."
    )
