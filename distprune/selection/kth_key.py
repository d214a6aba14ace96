"""The search for the k-th key of all elements, over all ranks.

A sample suggests a bracket around the key (bracket.py); one scan counts the keys around it and
collects those inside it. The sample affects the speed only, not the result: when a bracket misses,
the next round brackets inside the interval that two exact counts leave. A search of a kind that was
done before can begin at the key that was found then, without a sample (start.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from distprune._common.memory import concatenate, select
from distprune._common.naming import error_about
from distprune.selection.bracket import COLLECT_ALL, Around, bracket
from distprune.selection.candidates import Candidates
from distprune.selection.keys import KeyRange
from distprune.selection.passes import BinCounts, Scan, scan
from distprune.selection.radix import (
    Search,
    changed,
    descent_over,
    histogram_of,
    narrowed,
    within,
)
from distprune.selection.start import Start


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
