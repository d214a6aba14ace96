"""Exact selection over all ranks: find where the total order is cut after k elements.

The order is (key of the score, position of the parameter in the caller's list,
row-major index in the whole parameter). Ranks exchange counts and histograms,
never scores:

1. a sample brackets the k-th key;
2. one read counts the keys around the bracket and collects those inside it, and can draft
   the masks;
3. the k-th key is radix-selected among the collected ones;
4. the ties at that key are cut by parameter, then by index, the same way.

The sample decides how fast this is, not what comes out: when the bracket misses,
the next round brackets inside the interval that two exact counts leave.

Source: sampled bracket after Floyd and Rivest, "Expected time bounds for
selection", CACM 1975; radix descent after Alabi et al., "Fast k-selection
algorithms for graphics processing units", JEA 2012.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from distprune._common.collectives import Communicator
from distprune._common.memory import concatenate, select
from distprune.selection.candidates import Candidates, Cut, Interval
from distprune.selection.keys import KeyRange
from distprune.selection.passes import Reading, indices_at, read, sample

T = TypeVar("T")

# A search yields local steps (see collectives.[Note: all or none]): the size of what a step
# returns, an int64 tensor, and the step. It is sent the sum over all ranks. What it does between
# them depends only on values that all ranks share.
Step = tuple[int, Callable[[], Tensor]]
Search = Generator[Step, Tensor, T]

_BINS_LOG2 = 11
# Keys that are binned at a time: the widened copy of them stays in the cache.
_HISTOGRAM_CHUNK = 1 << 15
# One more than a power of two: an interval need not start at a bin's edge.
_BINS = (1 << _BINS_LOG2) + 1
# A bracket this many standard deviations wide misses about once in a million.
_SIGMAS = 5.0
# Up to so many elements in all are collected outright: a sample would not pay.
_COLLECT_ALL = 1 << 16
# A key that holds a larger share of the sample than this is counted, not collected.
_HEAVY = 0.01


@dataclass(frozen=True)
class Selection:
    """What was selected: a cut, and facts about it that all ranks share.

    Attributes:
        cut: where the total order is cut.
        num_ties: elements whose key equals the threshold; ...
        num_ties_pruned: ... and how many of them come before the cut.
        num_before: per whole parameter, its elements before the cut.
        drafted: the read that drafted masks, if masks were wanted and one did; it may have
            drafted them for another cut.
    """

    cut: Cut
    num_ties: int
    num_ties_pruned: int
    num_before: list[int]
    drafted: Reading | None = None


def select_lowest(
    parts: Sequence[Candidates],
    names: Sequence[str],
    num_live: Sequence[int],
    k: int,
    keys: KeyRange,
    communicator: Communicator,
    *,
    refuse_nan: bool,
    drafts: Sequence[Tensor] | None = None,
    count_each: bool = False,
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
        drafts: flat masks, uninitialised, one per part, to draft during the read;
            see passes.[Note: draft].
        count_each: whether ``Selection.num_before`` is wanted.

    Raises:
        ValueError: a live score is NaN; names its parameters.
        RuntimeError: the scores changed while they were read.

    Cost: one read of the scores (more when a bracket misses) and about ten
    all-reduces of up to 32 KiB; memory for the collected keys, about 0.5 % of
    them at 10**8 elements and less above.
    """
    search = search_lowest(
        parts,
        names,
        num_live,
        k,
        keys,
        refuse_nan=refuse_nan,
        drafts=drafts,
        count_each=count_each,
    )
    return search_together([search], communicator)[0]


def search_together(searches: Sequence[Search[T]], communicator: Communicator) -> list[T]:
    """Run searches side by side, on every rank the same ones; their results.

    What all of them want summed goes into one all-reduce.
    """
    results: dict[int, T] = {}
    sums: dict[int, Tensor | None] = dict.fromkeys(range(len(searches)))
    while sums:
        steps: dict[int, Step] = {}
        for which, shared in sums.items():
            try:
                # A generator is started by sending None.
                steps[which] = searches[which].send(shared)  # type: ignore[arg-type]
            except StopIteration as finished:
                results[which] = finished.value
        if not steps:
            break
        sizes = [size for size, _ in steps.values()]
        flat = communicator.sum_of(
            sum(sizes),
            lambda steps=steps: torch.cat([step() for _, step in steps.values()]),
        )
        sums = dict(zip(steps, flat.split(sizes), strict=True))
    return [results[which] for which in range(len(searches))]


def search_lowest(
    parts: Sequence[Candidates],
    names: Sequence[str],
    num_live: Sequence[int],
    k: int,
    keys: KeyRange,
    *,
    refuse_nan: bool,
    drafts: Sequence[Tensor] | None = None,
    count_each: bool = False,
) -> Search[Selection]:
    """:func:`select_lowest` as a search that can run beside others."""
    nothing = Selection(Cut(keys.low, 0, 0), 0, 0, [0] * len(parts))
    if k == 0 and not (refuse_nan and keys.is_float):
        return nothing
    search = _Search(parts, names, num_live, keys, refuse_nan, drafts)
    found = yield from search.find(min(max(k, 1), sum(num_live)))
    if k == 0:
        return nothing

    def count() -> Tensor:
        below, ties = found.count()
        return torch.tensor([*ties, *below] if count_each else ties, dtype=torch.int64)

    size = len(parts) * (2 if count_each else 1)
    ties, *below = (yield size, count).split(len(parts))
    num_ties, wanted = int(ties.sum()), k - found.num_below
    before = torch.cat([torch.zeros(1, dtype=torch.int64), ties.cumsum(0)])
    if wanted == num_ties:
        cut = Cut(found.threshold, len(parts), 0)
    else:
        position = int(torch.searchsorted(before[1:], wanted))
        index = yield from _cut_ties(
            parts[position],
            found.threshold,
            wanted - int(before[position]),
            lambda: found.indices_of_ties(parts[position], position),
        )
        cut = Cut(found.threshold, position, index)
    # The ties of a parameter that are pruned: what the parameters before it leave of all.
    of_ties = torch.minimum((wanted - before[:-1]).clamp(min=0), ties)
    num_before = (below[0] + of_ties).tolist() if below else []
    return Selection(cut, num_ties, wanted, num_before, search.drafted)


@dataclass(frozen=True)
class _Kth:
    """The k-th key, and where this rank's elements are around it.

    Attributes:
        threshold: the key.
        num_below: elements of all ranks with a smaller one.
        count: a local step: per parameter, this rank's elements with a smaller key, and with
            this one.
        reading: the read that collected it; None if it was found by counting.
    """

    threshold: int
    num_below: int
    count: Callable[[], tuple[list[int], list[int]]]
    reading: Reading | None

    def indices_of_ties(self, part: Candidates, position: int) -> Tensor | None:
        """Global indices, 1-d, of this rank's ties in a parameter; None if they are not at hand."""
        if self.reading is None:
            return None
        return concatenate(
            [
                part.index(
                    select(found.positions, found.keys == self.threshold).long() + found.span.start
                ).cpu()
                for found in self.reading.found[position]
                if found.is_counted
            ]
        )


@dataclass
class _Sample:
    """Keys that a local step drew, or narrowed down, for later ones: 1-d, on the CPU."""

    keys: Tensor


@dataclass(frozen=True)
class _Around:
    """What to read around the k-th key.

    Attributes:
        pivots: keys to count up to.
        interval: of keys to collect, if any.
        sample: what the interval was chosen by; None: it holds everything.
    """

    pivots: set[int]
    interval: Interval | None
    sample: _Sample | None = None

    def expected_share(self) -> float:
        """About how much of this rank's elements there is to collect."""
        if self.interval is None:
            return 0.0
        if self.sample is None:
            return 1.0
        inside = _within(self.sample.keys, *self.interval)
        return inside.numel() / max(1, self.sample.keys.numel())


@dataclass
class _Search:
    """The search for the k-th key: an interval of keys that shrinks around it."""

    parts: Sequence[Candidates]
    names: Sequence[str]
    num_live: Sequence[int]
    keys: KeyRange
    refuse_nan: bool
    drafts: Sequence[Tensor] | None
    # The last read that wrote drafts, and the last read of all.
    drafted: Reading | None = None
    collected: Reading | None = None
    # Local live keys <= a pivot, per part, for every pivot counted so far.
    local_counts: dict[int, list[int]] = field(default_factory=dict)
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def find(self, k: int) -> Search[_Kth]:
        """The k-th key (1-based)."""
        keys, total = self.keys, sum(self.num_live)
        # The k-th key lies in [low, high].
        low, high = keys.low, keys.largest_number if self.refuse_nan else keys.high
        below, upto = 0, total  # keys < low, keys <= high
        if total == 0:
            nothing = [0] * len(self.parts)
            return _Kth(low, 0, lambda: (nothing, nothing), None)
        self.local_counts[low - 1] = [0] * len(self.parts)
        num_rounds = 0
        while high > low:
            inside = upto - below
            if inside <= _COLLECT_ALL:
                around = _Around(set(), (low, high))
            else:
                around = yield from self._bracket(k - below, inside, low, high, num_rounds)
            if num_rounds == 0 and self.refuse_nan and keys.is_float:
                around.pivots.add(high)
            counts, histogram = yield from self._read_and_count(around)
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
            interval = around.interval
            if interval is not None and interval[0] - 1 <= start and end <= interval[1]:
                return (yield from self._descend(k - less, start + 1, end, less, histogram))
            low, high, below, upto = start + 1, end, less, count
            num_rounds += 1

        def count_at() -> tuple[list[int], list[int]]:
            at, under = self._local(low), self._local(low - 1)
            return under, [a - b for a, b in zip(at, under, strict=True)]

        return _Kth(low, below, count_at, None)

    def _local(self, pivot: int) -> list[int]:
        if pivot not in self.local_counts:
            self._read([pivot], _Around(set(), None))
        return self.local_counts[pivot]

    def _bracket(
        self, k: int, inside: int, low: int, high: int, num_rounds: int
    ) -> Search[_Around]:
        """Pivots around the k-th of the ``inside`` keys in [low, high], and what to collect.

        Both are the same on every rank: they are decided by summed histograms.
        """
        total = sum(part.numel for part in self.parts)
        rate = min(1.0, sample_size(total) * 2**num_rounds / total)
        drawn = _Sample(torch.empty(0, dtype=torch.int64))

        def draw() -> Tensor:
            drawn.keys = sample(self.parts, rate, self.keys.high + 1, self.generator)
            return _histogram(_within(drawn.keys, low, high), low, high)

        histogram = yield _BINS, draw
        size = int(histogram.sum())
        if size == 0:
            return _Around(_eight_pivots(low, high), None)
        centre = k / inside * size
        margin = margin_of(centre, size)
        pivots: set[int] = set()
        first, last = low, high  # the interval to collect
        for rank, is_lower in ((centre - margin, True), (centre + margin, False)):
            rank = math.floor(rank) if is_lower else math.ceil(rank)
            if not 0 <= rank < size:
                continue
            key, num_equal = yield from self._order_statistic(
                drawn, histogram, rank, low, high, margin / 5
            )
            # A key that holds much of the sample is counted, not collected.
            heavy = key[0] == key[1] and num_equal > max(_HEAVY * size, margin / 5)
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
        pivots = {pivot for pivot in pivots if low <= pivot < high}
        if not pivots and inside > max(_COLLECT_ALL, total // 50):
            return _Around(_eight_pivots(low, high), None)
        if first > last:
            return _Around(pivots, None)
        return _Around(pivots, (first, last), drawn)

    def _order_statistic(
        self, drawn: _Sample, histogram: Tensor, rank: int, low: int, high: int, tolerance: float
    ) -> Search[tuple[tuple[int, int], int]]:
        """An interval of keys that holds the sample's rank-th key and little else."""
        while True:
            low, high, rank, count = _descend_once(histogram, rank, low, high)
            if high == low or count <= tolerance:
                return (low, high), count
            histogram = yield _BINS, _binning(lambda: drawn.keys, low, high)

    def _read(self, pivots: list[int], around: _Around) -> Reading:
        """One pass; drafts masks if it can. Local."""
        reading = read(self.parts, pivots, around.interval, self.drafts, around.expected_share())
        if self.drafts is not None and around.interval is not None:
            self.drafted = reading
        for j, pivot in enumerate(pivots):
            self.local_counts[pivot] = [row[j] for row in reading.counts]
        return reading

    def _read_and_count(self, around: _Around) -> Search[tuple[dict[int, int], Tensor]]:
        """Global counts per pivot, and the histogram of the collected keys."""
        pivots, interval = sorted(around.pivots), around.interval

        def count() -> Tensor:
            self.collected = reading = self._read(pivots, around)
            counts = [sum(self.local_counts[pivot]) for pivot in pivots]
            local = torch.tensor(counts, dtype=torch.int64)
            if interval is None:
                return local
            return torch.cat([local, _histogram(reading.keys, *interval)])

        shared = yield len(pivots) + (0 if interval is None else _BINS), count
        return dict(zip(pivots, shared.tolist(), strict=False)), shared[len(pivots) :]

    def _descend(self, k: int, low: int, high: int, below: int, histogram: Tensor) -> Search[_Kth]:
        """Radix-select the k-th of the collected keys in [low, high]."""
        reading = self.collected
        assert reading is not None
        rank = k - 1
        if (low, high) != reading.interval:
            histogram = yield _BINS, _binning(lambda: reading.keys, low, high)
        inside = _Sample(reading.keys)

        def narrow() -> Tensor:
            inside.keys = _within(inside.keys, low, high)
            return _histogram(inside.keys, low, high)

        while True:
            low, high, rank, _ = _descend_once(histogram, rank, low, high)
            if low == high:
                break
            histogram = yield _BINS, narrow

        def count() -> tuple[list[int], list[int]]:
            found = [each.numpy() for each in reading.keys.split(reading.sizes)]
            ties = [int(np.count_nonzero(each == low)) for each in found]
            under = [
                less + int(np.count_nonzero(each < low))
                for less, each in zip(reading.num_below, found, strict=True)
            ]
            return under, ties

        return _Kth(low, below + k - 1 - rank, count, reading)

    def _raise_nan(self) -> Search[None]:
        """Name the parameters; every rank knows that there are NaN."""
        numbers = self.local_counts[self.keys.largest_number]
        count = torch.tensor(numbers, dtype=torch.int64)
        not_nan = (yield len(numbers), lambda: count).tolist()
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


def sample_size(num_elements: int) -> float:
    """Keys that are sampled of so many, over all ranks."""
    # 4 n^(2/3) balances the cost of the sample and of the keys that it leaves.
    return min(num_elements, max(4096.0, 4 * num_elements ** (2 / 3)))


def margin_of(centre: float, size: float) -> float:
    """How far, in ranks of a sample, its bracket reaches to either side of ``centre``."""
    return _SIGMAS * math.sqrt(max(centre * (1 - centre / size), 0.0)) + 4


def _cut_ties(
    part: Candidates, key: int, wanted: int, collected: Callable[[], Tensor | None]
) -> Search[int]:
    """The global index below which exactly ``wanted`` elements of a parameter have a key.

    Radix selection over the index, of the ties alone: of those ``collected``, if they are at hand;
    otherwise one read of this parameter, or two when there are more ties than are kept.
    """
    low, high, rank = 0, part.numel - 1, wanted - 1
    held: Tensor | None = None
    is_first = True

    def bin_ties() -> Tensor:
        nonlocal held, is_first
        if is_first:
            held, is_first = collected(), False
        if held is not None:
            held = _within(held, low, high)
            return _histogram(held, low, high)
        histogram = torch.zeros(_BINS, dtype=torch.int64)
        kept, num_found = [], 0
        for found in indices_at(part, key, low, high + 1):
            histogram += _histogram(found, low, high)
            num_found += found.numel()
            # Many ties are found again in the next round, when most are out of range.
            if num_found <= _COLLECT_ALL:
                kept.append(found)
        if num_found <= _COLLECT_ALL:
            held = concatenate(kept)
        return histogram

    while low < high:
        low, high, rank, _ = _descend_once((yield _BINS, bin_ties), rank, low, high)
    return low + 1


def _binning(keys: Callable[[], Tensor], low: int, high: int) -> Callable[[], Tensor]:
    """A local step: the histogram of the keys in [low, high]."""
    return lambda: _histogram(_within(keys(), low, high), low, high)


def _eight_pivots(low: int, high: int) -> set[int]:
    """Without information: split the keys themselves."""
    step = max(1, (high - low + 1) // 8)
    return {low + step * i - 1 for i in range(1, 8) if low <= low + step * i - 1 < high}


def _within(keys: Tensor, low: int, high: int) -> Tensor:
    if keys.numel() == 0:
        return keys
    raw = keys.numpy()
    if low <= int(raw.min()) and int(raw.max()) <= high:
        return keys
    return torch.from_numpy(raw[(raw >= low) & (raw <= high)])


def _bin_shift(low: int, high: int) -> int:
    return max(0, (high - low).bit_length() - _BINS_LOG2)


def _histogram(keys: Tensor, low: int, high: int) -> Tensor:
    """int64 [2049] counts of keys that all lie in [low, high]."""
    counts = np.zeros(_BINS, dtype=np.int64)
    shift = _bin_shift(low, high)
    raw = keys.numpy()
    for start in range(0, raw.size, _HISTOGRAM_CHUNK):
        # Signed keys of a whole dtype would overflow when shifted down to zero.
        bins = (raw[start : start + _HISTOGRAM_CHUNK] >> shift).astype(np.int64)
        bins -= low >> shift
        counts += np.bincount(bins, minlength=_BINS)
    return torch.from_numpy(counts)


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
