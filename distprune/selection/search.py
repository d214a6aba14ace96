"""Exact selection over all ranks: find where the total order is cut after k elements.

The order is (key of the score, position of the parameter in the caller's list,
row-major index in the whole parameter). Ranks exchange counts and histograms,
never scores:

1. a sample brackets the k-th key (bracket.py);
2. one scan counts the keys around the bracket, collects those inside it, and can draft the
   masks (passes.py);
3. the k-th key is radix-selected among the collected ones (radix.py);
4. the ties at that key are cut by parameter, then by index, the same way.

The sample affects the speed only, not the result: when a bracket misses, the next round brackets
inside the interval that two exact counts leave. A search that is repeated begins with step 2,
around the key that it found before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from distprune._common.collectives import Reducer
from distprune._common.memory import concatenate, select
from distprune._common.naming import error_about
from distprune.selection.bracket import COLLECT_ALL, Around, Start, bracket, next_start
from distprune.selection.candidates import Candidates, Cut
from distprune.selection.keys import KeyRange
from distprune.selection.passes import BinCounts, Scan, count_in_bins, indices_at, scan
from distprune.selection.radix import (
    Descent,
    Search,
    Step,
    changed,
    descent_over,
    histogram_of,
    narrowed,
    within,
)
from distprune.selection.scores import Tally
from distprune.selection.tallies import are_tallied, keys_of_tally

T = TypeVar("T")


@dataclass(frozen=True)
class Selection:
    """A cut, and facts about it that are the same on all ranks.

    Attributes:
        cut: where the total order is cut.
        num_ties: elements whose key equals the threshold; ...
        num_ties_pruned: ... and how many of them come before the cut.
        num_before: per whole parameter, its elements before the cut.
        drafted: the scan that drafted masks; None without drafts. It may have drafted them for
            another cut.
        start: where a search of the same kind may look first; None if little was searched.
    """

    cut: Cut
    num_ties: int
    num_ties_pruned: int
    num_before: list[int]
    drafted: Scan | None = None
    start: Start | None = None


def select_lowest(
    parts: Sequence[Candidates],
    names: Sequence[str],
    num_live: Sequence[int],
    k: int,
    keys: KeyRange,
    communicator: Reducer,
    *,
    refuse_nan: bool,
    drafts: Sequence[Tensor] | None = None,
    count_each: bool = False,
    most_collected: int | None = None,
) -> Selection:
    """Cut the total order of all live elements after exactly ``k`` of them.

    Args:
        parts: this rank's part of every parameter, in the same order on all ranks.
        names: of the parameters, for messages.
        num_live: live elements of every whole parameter.
        k: elements before the cut, 0 <= k <= sum(num_live).
        keys: the range of all keys.
        communicator: the ranks that have the parts.
        refuse_nan: raise on a live NaN, on every rank; otherwise NaN rank last.
        drafts: flat masks, uninitialised, one per part, to draft during the scan;
            see passes.[Note: draft].
        count_each: whether to count ``Selection.num_before``, which is empty otherwise.
        most_collected: keys that all ranks together may collect in memory; None: any number.

    Raises:
        ValueError: a live score is NaN; names its parameters.
        RuntimeError: the scores changed between two scans.

    Cost: one scan of the scores (more when a bracket misses, or more keys lie in it than may be
    collected) and about ten all-reduces of up to 32 KiB; memory for the collected keys, about 0.5 %
    of them at 10**8 elements and less above. No scan if all parts have tallies.
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
        most_collected=most_collected,
    )
    shared: Tensor | None = None  # a generator is started by sending None
    while True:
        try:
            size, step = search.send(shared)  # type: ignore[arg-type]
        except StopIteration as finished:
            selection: Selection = finished.value
            return selection
        shared = communicator.reduce(size, step)


def search_together(searches: Sequence[Search[T]], communicator: Reducer) -> list[T]:
    """Run the same searches on every rank, side by side; their results.

    The steps that all of them wait for share one all-reduce.
    """
    results: dict[int, T] = {}
    # By number of a search, the sums to send it; a generator is started by sending None.
    sums: dict[int, Tensor | None] = dict.fromkeys(range(len(searches)))
    while sums:
        steps: dict[int, Step] = {}
        for number, shared in sums.items():
            try:
                steps[number] = searches[number].send(shared)  # type: ignore[arg-type]
            except StopIteration as finished:
                results[number] = finished.value
        sums = _sum_together(steps, communicator) if steps else {}
    return [results[number] for number in range(len(searches))]


def _sum_together(steps: dict[int, Step], communicator: Reducer) -> dict[int, Tensor | None]:
    """The sums of all steps, by one all-reduce."""

    def take() -> Tensor:
        return torch.cat([step() for _, step in steps.values()])

    sizes = [size for size, _ in steps.values()]
    sums = torch.split(communicator.reduce(sum(sizes), take), sizes)
    return dict(zip(steps, sums, strict=True))


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
    start: Start | None = None,
    most_collected: int | None = None,
    is_wanted: Callable[[list[int]], bool] | None = None,
) -> Search[Selection]:
    """:func:`select_lowest` as a search that can run beside others.

    Args:
        start: of an earlier search, where this one looks first; the same on all ranks. It does
            not change the result.
        is_wanted: from ``Selection.num_before`` to whether the cut among ties is needed; it does
            not lie among them otherwise, where it should. None: it is.
    """
    nothing = Selection(Cut(keys.low, 0, 0), 0, 0, [0] * len(parts))
    if k == 0 and not (refuse_nan and keys.is_float):
        return nothing
    search: KthKeySearch | TallySearch
    if are_tallied(parts):
        search = TallySearch(parts, names, num_live, keys, refuse_nan)
    else:
        search = KthKeySearch(
            parts, names, num_live, keys, refuse_nan, drafts, start, most_collected
        )
    kth = yield from search.find(min(max(k, 1), sum(num_live)))
    if k == 0:
        return nothing

    num_ties, num_ties_pruned = kth.num_ties, k - kth.num_below
    total = sum(num_live)
    following = None
    if total > COLLECT_ALL:
        following = next_start(keys, kth.threshold, num_ties, total, search.density, start)
    if num_ties_pruned == num_ties and not count_each:
        cut = Cut(kth.threshold, len(parts), 0)
        return Selection(cut, num_ties, num_ties, [], search.drafted, following)

    def count() -> Tensor:
        below, ties = kth.count()
        return torch.tensor([*ties, *below] if count_each else ties, dtype=torch.int64)

    size = len(parts) * (2 if count_each else 1)
    ties, *below = torch.split((yield size, count), len(parts))
    if int(ties.sum()) != num_ties:
        raise changed()
    ties_before = torch.cat([torch.zeros(1, dtype=torch.int64), ties.cumsum(0)])
    # Ties go parameter by parameter, until enough of them are pruned.
    pruned_of_ties = torch.minimum((num_ties_pruned - ties_before[:-1]).clamp(min=0), ties)
    num_before = (below[0] + pruned_of_ties).tolist() if below else []
    if num_ties_pruned == num_ties or (is_wanted is not None and not is_wanted(num_before)):
        cut = Cut(kth.threshold, len(parts), 0)
    else:
        position = int(torch.searchsorted(ties_before[1:], num_ties_pruned))
        index = yield from cut_ties(
            parts[position],
            kth.threshold,
            num_ties_pruned - int(ties_before[position]),
            lambda: kth.indices_of_ties(parts[position], position),
        )
        cut = Cut(kth.threshold, position, index)
    return Selection(cut, num_ties, num_ties_pruned, num_before, search.drafted, following)


@dataclass(frozen=True)
class KthKey:
    """The k-th key, and how this rank's elements lie around it.

    Attributes:
        threshold: the key.
        num_below: elements of all ranks with a smaller key ...
        num_ties: ... and with this key.
        count: a local step: per parameter, this rank's elements with a smaller key, and those with
            this key.
        scanned: the scan that collected the key; None if counts alone determined it.
    """

    threshold: int
    num_below: int
    num_ties: int
    count: Callable[[], tuple[list[int], list[int]]]
    scanned: Scan | None

    def indices_of_ties(self, part: Candidates, position: int) -> Tensor | None:
        """Global indices, 1-d, of this rank's ties in a parameter; None if none were collected."""
        if self.scanned is None:
            return None
        return concatenate(
            [
                part.index(
                    select(chunk.positions, chunk.keys == self.threshold).long() + chunk.span.start
                ).cpu()
                for chunk in self.scanned.collected[position]
                if chunk.is_counted
            ]
        )


@dataclass
class KthKeySearch:
    """The search for the k-th key: an interval of keys that shrinks around it."""

    parts: Sequence[Candidates]
    names: Sequence[str]
    num_live: Sequence[int]
    keys: KeyRange
    refuse_nan: bool
    drafts: Sequence[Tensor] | None
    start: Start | None = None  # where to look first
    # Keys that all ranks together may collect; of more, the keys of an interval are only counted.
    most_collected: int | None = None
    # Elements per key around the k-th one, once it is found among collected keys.
    density: float | None = None
    # The last scan that wrote drafts, and the last scan that collected keys.
    drafted: Scan | None = None
    collected: Scan | None = None
    # By pivot, this rank's live keys <= the pivot in each part.
    local_counts: dict[int, list[int]] = field(default_factory=dict)
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def find(self, k: int) -> Search[KthKey]:
        """The k-th key (1-based)."""
        keys, total = self.keys, sum(self.num_live)
        # The k-th key lies in [low, high].
        low, high = keys.low, keys.largest_number if self.refuse_nan else keys.high
        below, upto = 0, total  # keys < low, keys <= high
        if total == 0:
            nothing = [0] * len(self.parts)
            return KthKey(low, 0, 0, lambda: (nothing, nothing), None)
        self.local_counts[low - 1] = [0] * len(self.parts)
        num_rounds, num_missed = 0, 0  # scans so far, and those whose bracket came from a sample
        while high > low:
            inside = upto - below
            begins_at = None
            if inside <= COLLECT_ALL or (num_rounds and inside <= (self.most_collected or 0)):
                around = Around(set(), (low, high), share=inside / total)
            elif num_rounds == 0 and self.start is not None and self.start.keys == keys:
                begins_at = self.start
                around = _around(begins_at, low, high)
            else:
                around = yield from bracket(
                    self.parts,
                    k - below,
                    inside,
                    low,
                    high,
                    highest=keys.high,
                    num_rounds=num_missed,
                    generator=self.generator,
                )
            if num_rounds == 0 and self.refuse_nan and keys.is_float:
                around.pivots.add(high)
            only_counts = self.most_collected is not None and (
                around.most_of(total) > self.most_collected
            )
            counts, histogram = yield from self._scan_and_count(around, begins_at, only_counts)
            if counts.get(keys.largest_number, total) < total and self.refuse_nan:
                yield from self._raise_nan()
            # Cumulative counts at the pivots: the k-th key lies between two neighbours.
            edges = sorted({low - 1: below, **counts, high: upto}.items())
            around_k = [
                (start, less, end, count)
                for (start, less), (end, count) in itertools.pairwise(edges)
                if less < k <= count
            ]
            if len(around_k) != 1:
                raise changed()
            start, less, end, count = around_k[0]
            interval = None if histogram is None else around.interval
            if interval is not None and interval[0] - 1 <= start and end <= interval[1]:
                assert histogram is not None
                inside = counts.get(interval[1], upto) - counts.get(interval[0] - 1, below)
                self.density = inside / (interval[1] - interval[0] + 1)
                if not only_counts:
                    return (yield from self._descend(k - less, start + 1, end, less, histogram))
                if (start + 1, end) == interval:
                    bins, upto = narrowed(descent_over(start + 1, end, k - less - 1), histogram)
                    below = k - 1 - bins.rank
                    low, high, upto = bins.low, bins.high, below + upto
                    num_rounds += 1
                    continue
            low, high, below, upto = start + 1, end, less, count
            num_rounds += 1
            num_missed += begins_at is None

        def count_at() -> tuple[list[int], list[int]]:
            at, under = self._local(low), self._local(low - 1)
            return under, [a - b for a, b in zip(at, under, strict=True)]

        return KthKey(low, below, upto - below, count_at, None)

    def _local(self, pivot: int) -> list[int]:
        if pivot not in self.local_counts:
            self._remember(scan(self.parts, [pivot], None), [pivot])
        return self.local_counts[pivot]

    def _remember(self, scanned: Scan, pivots: Sequence[int]) -> None:
        if self.drafts is not None and scanned.interval is not None:
            self.drafted = scanned
        for j, pivot in enumerate(pivots):
            self.local_counts[pivot] = [row[j] for row in scanned.counts]

    def _scan_and_count(
        self, around: Around, begins_at: Start | None, only_counts: bool
    ) -> Search[tuple[dict[int, int], Tensor | None]]:
        """Global counts per pivot, and the histogram of the keys in the interval.

        There is none if there is no interval, or if some rank finds that the interval of a
        start has become too crowded; its elements are then counted at both ends only.

        Args:
            only_counts: do not collect the keys of the interval.
        """
        pivots, interval = sorted(around.pivots), around.interval

        def count() -> Tensor:
            collects = interval
            if begins_at is not None and interval is not None:
                collects = None if begins_at.is_crowded(self.parts, interval) else interval
            if only_counts:
                assert interval is not None
                in_bins = BinCounts(descent_over(*interval))
                scanned = scan(self.parts, pivots, interval, bins=in_bins)
                self._remember(scanned, pivots)
                of_pivots = [sum(self.local_counts[pivot]) for pivot in pivots]
                return torch.cat([torch.tensor([0, *of_pivots]), in_bins.counts])
            share = around.expected_share() if begins_at is None else begins_at.share
            scanned = scan(self.parts, pivots, collects, self.drafts, share)
            self.collected = scanned
            self._remember(scanned, pivots)
            counts = [sum(self.local_counts[pivot]) for pivot in pivots]
            local = torch.tensor([int(collects is None), *counts], dtype=torch.int64)
            if interval is None:
                return local
            bins = descent_over(*interval)
            if collects is None:
                return torch.cat([local, torch.zeros(bins.num_bins, dtype=torch.int64)])
            return torch.cat([local, histogram_of(scanned.keys, bins)])

        num_bins = 0 if interval is None else descent_over(*interval).num_bins
        shared = yield 1 + len(pivots) + num_bins, count
        num_without, *counts = shared[: 1 + len(pivots)].tolist()
        histogram = None if num_without else shared[1 + len(pivots) :]
        return dict(zip(pivots, counts, strict=True)), histogram

    def _descend(
        self, k: int, low: int, high: int, below: int, histogram: Tensor
    ) -> Search[KthKey]:
        """Radix-select the k-th of the collected keys in [low, high]."""
        scanned = self.collected
        assert scanned is not None
        inside = scanned.keys
        descent = descent_over(low, high, k - 1)

        def count_bins() -> Tensor:
            nonlocal inside
            inside = within(inside, descent.low, descent.high)
            return histogram_of(inside, descent)

        if (low, high) != scanned.interval:
            histogram = yield descent.num_bins, count_bins
        while True:
            descent, num_ties = narrowed(descent, histogram)
            if descent.is_done:
                break
            histogram = yield descent.num_bins, count_bins
        threshold = descent.low

        def count() -> tuple[list[int], list[int]]:
            keys_of_parts = [keys.numpy() for keys in torch.split(scanned.keys, scanned.sizes)]
            ties = [int(np.count_nonzero(keys == threshold)) for keys in keys_of_parts]
            under = [
                less + int(np.count_nonzero(keys < threshold))
                for less, keys in zip(scanned.num_below, keys_of_parts, strict=True)
            ]
            return under, ties

        return KthKey(threshold, below + k - 1 - descent.rank, num_ties, count, scanned)

    def _raise_nan(self) -> Search[None]:
        """Raise an error that names the parameters; all ranks call this."""
        local = torch.tensor(self.local_counts[self.keys.largest_number], dtype=torch.int64)
        numbers = yield local.numel(), lambda: local
        num_nan = torch.tensor(self.num_live) - numbers
        refuse_nan_in(self.names, self.num_live, num_nan.tolist())
        raise changed()


class TallySearch:
    """The search for the k-th key among tallied parts: reads nothing.

    Args:
        parts: whose keys all have tallies.
        names: of the parameters, for messages.
        num_live: live elements of every whole parameter.
        keys: the range of the keys.
        refuse_nan: raise on a live NaN; otherwise NaN rank last.
    """

    # What a search that reads knows besides: see kth_key.KthKeySearch.
    drafted = None
    density = None

    def __init__(
        self,
        parts: Sequence[Candidates],
        names: Sequence[str],
        num_live: Sequence[int],
        keys: KeyRange,
        refuse_nan: bool,
    ) -> None:
        self._parts = parts
        self._names = names
        self._num_live = num_live
        self._keys = keys
        self._refuse_nan = refuse_nan

    def find(self, k: int) -> Search[KthKey]:
        """The k-th key (1-based)."""
        keys = self._keys
        if self._refuse_nan and keys.is_float:
            what = len(self._parts), partial(self._count_upto, keys.largest_number)
            num_nan = torch.tensor(self._num_live) - (yield what)
            refuse_nan_in(self._names, self._num_live, num_nan.tolist())
        nothing = [0] * len(self._parts)
        if not sum(self._num_live):
            return KthKey(keys.low, 0, 0, lambda: (nothing, nothing), None)
        descent, num_ties = descent_over(keys.low, keys.high, k - 1), sum(self._num_live)
        while not descent.is_done:
            step = partial(self._histogram, descent.low, descent.high, descent.shift)
            descent, num_ties = narrowed(descent, (yield descent.num_bins, step))
        threshold = descent.low

        def count() -> tuple[list[int], list[int]]:
            under = self._count_upto(threshold - 1)
            ties = self._count_upto(threshold) - under
            return under.tolist(), ties.tolist()

        return KthKey(threshold, k - 1 - descent.rank, num_ties, count, None)

    def _count_upto(self, key: int) -> Tensor:
        """Per part, this rank's elements with a key up to this one."""
        counts = [
            int(of_part[keys <= key].sum(dtype=np.int64))
            for keys, of_part in map(keys_of_tally, self._parts)
        ]
        return torch.tensor(counts, dtype=torch.int64)

    def _histogram(self, low: int, high: int, shift: int) -> Tensor:
        first = low >> shift
        histogram = np.zeros((high >> shift) - first + 1, dtype=np.int64)
        for keys, counts in map(keys_of_tally, self._parts):
            inside = (keys >= low) & (keys <= high)
            bins = (keys[inside] >> shift).astype(np.int64) - first
            # Exact: the counts of a rank are below 2**53.
            weights = counts[inside]
            histogram += np.bincount(bins, weights, len(histogram)).astype(np.int64)
        return torch.from_numpy(histogram)


def refuse_nan_in(names: Sequence[str], num_live: Sequence[int], num_nan: Sequence[int]) -> None:
    """Raise ValueError for the parameters that have NaN among their live elements."""
    where = {
        name: f"{nan} of {live}"
        for name, live, nan in zip(names, num_live, num_nan, strict=True)
        if nan
    }
    if where:
        parameters = ", ".join(f"{name} ({count})" for name, count in where.items())
        raise error_about(
            "nan",
            where,
            f"the scores of {parameters} are NaN; expected numbers for every unpruned "
            "element. NaN has no place in a ranking: repair the weights, or mask them first "
            "with custom_from_mask.",
        )


def _around(start: Start, low: int, high: int) -> Around:
    """What to count and collect around the key of an earlier search."""
    interval = start.interval_in(low, high)
    first, last = interval or (start.threshold, start.threshold)
    return Around({pivot for pivot in (first - 1, last) if low <= pivot < high}, interval)


# At most so many indices of ties are kept; for more, the next round scans the parameter again.
_KEPT = 1 << 16


def cut_ties(
    part: Candidates, key: int, num_pruned: int, collected: Callable[[], Tensor | None]
) -> Search[int]:
    """The global index below which exactly ``num_pruned`` elements of a parameter have a key.

    Where a tally has counts of blocks, only one block is looked at.

    Radix selection over the indices of the ties: of those that a scan has collected, if one has.
    Otherwise, where later positions of a shard have larger indices, each bin is a run of the shard,
    and its ties are counted: one scan of this parameter, and then of one bin. Elsewhere, in memory
    that is not row-major, one scan of this parameter finds the indices, or two when there are more
    ties than are kept.

    Args:
        collected: global indices of this rank's ties, or None.
    """
    descent = descent_over(0, part.numel - 1, num_pruned - 1)
    tally = part.keys.tally
    if tally is not None and tally.block < part.numel:
        descent, num_ties = yield from _block_of(tally, part.numel, key, num_pruned - 1)
        if descent.rank == num_ties - 1:
            return descent.high + 1
    ties: Tensor | None = None
    is_first = True

    def count_bins() -> Tensor:
        nonlocal ties, is_first
        if is_first:
            ties, is_first = collected(), False
        if ties is None and part.index.is_ascending:
            return count_in_bins(part, key, descent)
        if ties is not None:
            ties = within(ties, descent.low, descent.high)
            return histogram_of(ties, descent)
        histogram = torch.zeros(descent.num_bins, dtype=torch.int64)
        kept, num_ties = [], 0
        for indices in indices_at(part, key, descent.low, descent.high + 1):
            histogram += histogram_of(indices, descent)
            num_ties += indices.numel()
            if num_ties <= _KEPT:
                kept.append(indices)
        if num_ties <= _KEPT:
            ties = concatenate(kept)
        return histogram

    while not descent.is_done:
        descent, num_ties = narrowed(descent, (yield descent.num_bins, count_bins))
        if descent.rank == num_ties - 1:  # all ties of the bin are pruned, as if there are few
            return descent.high + 1
    return descent.low + 1


def _block_of(tally: Tally, numel: int, key: int, rank: int) -> Search[tuple[Descent, int]]:
    """The descent in the block that has the tie of a rank, and how many ties the block has."""
    num_blocks = -(-numel // tally.block)

    def count() -> Tensor:
        counts = torch.zeros(num_blocks, dtype=torch.int64)
        ties = tally.counts_of_blocks[:, tally.scores.numpy() == key].sum(axis=1, dtype=np.int64)
        counts[: len(ties)] = torch.from_numpy(ties)
        return counts

    counts = (yield num_blocks, count).numpy()
    num_before = np.cumsum(counts) - counts
    number = int(np.searchsorted(num_before, rank, side="right")) - 1
    if rank - num_before[number] >= counts[number]:
        raise changed()
    low = number * tally.block
    high = min(low + tally.block, numel) - 1
    return descent_over(low, high, rank - int(num_before[number])), int(counts[number])
