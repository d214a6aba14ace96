"""The search for the k-th key of all elements, over all ranks.

A sample suggests a bracket around the key (bracket.py); one scan counts the keys around it and
collects those inside it. The sample affects the speed only, not the result: when a bracket misses,
the next round brackets inside the interval that two exact counts leave.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.mask_values import is_one
from distprune.base.memory import Array, Scratch, concatenate, count_segments, select
from distprune.base.naming import UnfitScores
from distprune.selection import small
from distprune.selection.bracket import COLLECT_ALL, Around, bracket, eight_pivots
from distprune.selection.candidates import Candidates, Interval, Ranked
from distprune.selection.keys import replace_dead
from distprune.selection.passes import Scan, scan
from distprune.selection.radix import (
    Search,
    changed,
    descent_over,
    histogram_of,
    narrowed,
    within,
)


@dataclass(frozen=True)
class KthKey:
    """The k-th key, and how this rank's elements lie around it.

    Attributes:
        threshold: the key.
        num_below: elements of all ranks with a smaller key ...
        num_ties: ... and with this key.
        counts: a local step: per parameter, this rank's elements with a smaller key, and those with
            this key.
        scanned: the scan that collected the key; None if counts alone determined it.
    """

    threshold: int
    num_below: int
    num_ties: int
    counts: Callable[[], tuple[list[int], list[int]]]
    scanned: Scan | None = None

    def indices_of_ties(self, part: Candidates, position: int) -> Tensor | None:
        """Global indices, 1-d, of this rank's ties in a parameter; None if none were collected."""
        if self.scanned is None or part.is_small:
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
class Reading:
    """The search for the k-th key by scans: an interval of keys shrinks around it.

    Attributes:
        ranked: what is ranked.
        drafts: as for ``search.search_lowest``.
        scanned, drafted: the last scan, and the last one that wrote drafts.
        local_counts: by pivot, this rank's live keys <= the pivot in each part.
    """

    ranked: Ranked
    drafts: Sequence[Tensor] | None
    scanned: Scan | None = None
    drafted: Scan | None = None
    local_counts: dict[int, list[int]] = field(default_factory=dict)

    @functools.cached_property
    def generator(self) -> np.random.Generator:
        """Of the positions to sample; few elements need none."""
        return np.random.default_rng(0)

    @property
    def _is_alone(self) -> bool:
        """Whether no other rank has keys: then no histograms are needed."""
        return self.ranked.communicator.size == 1

    @functools.cached_property
    def _is_on_host(self) -> bool:
        """Whether numpy can select among the keys that this rank collects."""
        return all(memory.takes_numpy(part.device) for part in self.ranked.parts)

    def find(self, k: int) -> Search[KthKey]:
        """The k-th key (1-based)."""
        ranked, keys = self.ranked, self.ranked.keys
        parts, total, most = ranked.parts, sum(ranked.num_live), ranked.most_collected
        # The k-th key lies in [low, high]; below: keys < low, upto: keys <= high.
        low, high = keys.low, keys.largest_number if ranked.refuse_nan else keys.high
        below, upto, k = 0, total, min(k, total)
        nothing = [0] * len(parts)
        if total == 0:
            return KthKey(low, 0, 0, lambda: (nothing, nothing))
        if total <= COLLECT_ALL and self._is_alone and most is None:
            few = self._find_few(k)
            if few is not None:
                return few
        self.local_counts[low - 1] = nothing
        num_rounds, num_missed = 0, 0  # scans so far, and those that should have found the key
        while high > low:
            inside = upto - below
            if inside <= COLLECT_ALL or (num_rounds and inside <= (most or 0)):
                around = Around(set(), (low, high), share=inside / total)
            else:
                around = yield from bracket(
                    parts,
                    k - below,
                    inside,
                    low,
                    high,
                    highest=keys.high,
                    num_missed=num_missed,
                    generator=self.generator,
                )
            if num_rounds == 0 and ranked.refuse_nan and keys.is_float:
                around.pivots.add(high)
            interval = around.interval
            if most is not None and interval is not None and around.share * total > most:
                # The keys in it are counted, and the next interval is smaller.
                around.pivots.update(eight_pivots(*interval))
                interval = None
            else:
                num_missed += 1
            counts, histogram = yield from self._count(around, interval)
            if counts.get(keys.largest_number, total) < total and ranked.refuse_nan:
                _refuse_nan(ranked, (yield len(parts), self._local_numbers))
                raise changed()
            num_rounds += 1
            # Cumulative counts at the pivots: the k-th key lies between two neighbours.
            edges = sorted({low - 1: below, **counts, high: upto}.items())
            around_k = [
                (start + 1, end, less, count)
                for (start, less), (end, count) in itertools.pairwise(edges)
                if less < k <= count
            ]
            if len(around_k) != 1:
                raise changed()
            ((low, high, below, upto),) = around_k
            if interval is not None and interval[0] <= low and high <= interval[1]:
                return (yield from self._descend(k, (low, high), below, histogram))

        def count() -> tuple[list[int], list[int]]:
            at, under = self._local(low), self._local(low - 1)
            return under, [a - b for a, b in zip(at, under, strict=True)]

        return KthKey(low, below, upto - below, count)

    def _find_few(self, k: int) -> KthKey | None:
        """The k-th key of small parts that fill one batch; None of others, and if there are NaN."""
        parts, keys = self.ranked.parts, self.ranked.keys
        filled = [position for position, part in enumerate(parts) if part.num_local]
        if not all(parts[position].is_small for position in filled):
            return None
        batch, *others = small.batches_of(parts, filled, only_counted=True)
        loaded, masks = batch.load(Scratch()), batch.masks()
        if others or (self.ranked.refuse_nan and loaded.highest > keys.largest_number):
            return None
        numbers = loaded.values.numpy()
        if masks is not None:
            replace_dead(numbers, is_one(masks), keys.high + 1, Scratch())
        threshold, num_below, num_ties = _at_rank(numbers, k - 1)

        def count() -> tuple[list[int], list[int]]:
            under, ties = [0] * len(parts), [0] * len(parts)
            flags = (numbers < threshold, numbers == threshold)
            rows = zip(batch.positions, *map(batch.count, flags), strict=True)
            for position, num_less, num_equal in rows:
                under[position], ties[position] = num_less, num_equal
            return under, ties

        return KthKey(threshold, num_below, num_ties, count)

    def _local_numbers(self) -> Tensor:
        """Per part, this rank's live elements that are no NaN."""
        return torch.tensor(self._local(self.ranked.keys.largest_number))

    def _local(self, pivot: int) -> list[int]:
        if pivot not in self.local_counts:
            self._note(scan(self.ranked.parts, [pivot], None, self.drafts), [pivot])
        return self.local_counts[pivot]

    def _note(self, scanned: Scan, pivots: Sequence[int]) -> Scan:
        """Keep what a scan of this rank's parts counted and drafted."""
        if self.drafts is not None and scanned.interval is not None:
            self.drafted = scanned
        for j, pivot in enumerate(pivots):
            self.local_counts[pivot] = [row[j] for row in scanned.counts]
        return scanned

    def _count(
        self, around: Around, interval: Interval | None
    ) -> Search[tuple[dict[int, int], Tensor]]:
        """Global counts per pivot, and the histogram of the keys in the interval, if there is one.

        A single rank that collects keys on the host gets an empty histogram.
        """
        pivots = sorted(around.pivots)
        descent = None
        if interval is not None and not (self._is_alone and self._is_on_host):
            descent = descent_over(*interval)

        def count() -> Tensor:
            share = around.expected_share()
            self.scanned = self._note(
                scan(self.ranked.parts, pivots, interval, self.drafts, share), pivots
            )
            counts = torch.tensor(
                [sum(self.local_counts[pivot]) for pivot in pivots], dtype=torch.int64
            )
            if descent is None:
                return counts
            return torch.cat([counts, histogram_of(self.scanned.keys, descent)])

        shared = yield len(pivots) + (0 if descent is None else descent.num_bins), count
        counts = shared[: len(pivots)].tolist()
        return dict(zip(pivots, counts, strict=True)), shared[len(pivots) :]

    def _descend(self, k: int, interval: Interval, below: int, histogram: Tensor) -> Search[KthKey]:
        """Radix-select the k-th key among the collected ones in an interval.

        Args:
            interval: inside the one that was collected.
            below: how many smaller keys there are.
            histogram: of all that was collected.
        """
        scanned = self.scanned
        assert scanned is not None
        inside = scanned.keys
        descent = descent_over(*interval, k - below - 1)

        def count_bins() -> Tensor:
            nonlocal inside
            inside = within(inside, descent.low, descent.high)
            return histogram_of(inside, descent)

        if self._is_alone and self._is_on_host:
            threshold, num_less, num_ties = _at_rank(
                within(inside, *interval).numpy(), descent.rank
            )
            num_below = below + num_less
        else:
            if interval != scanned.interval:
                histogram = yield descent.num_bins, count_bins
            descent, num_ties = narrowed(descent, histogram)
            while not descent.is_done:
                descent, num_ties = narrowed(descent, (yield descent.num_bins, count_bins))
            threshold, num_below = descent.low, k - 1 - descent.rank

        def count() -> tuple[list[int], list[int]]:
            bounds = [*itertools.accumulate(scanned.sizes, initial=0)]
            under = count_segments(scanned.keys < threshold, bounds)
            ties = count_segments(scanned.keys == threshold, bounds)
            return [a + b for a, b in zip(scanned.num_below, under, strict=True)], ties

        return KthKey(threshold, num_below, num_ties, count, scanned)


def _at_rank(keys: Array, rank: int) -> tuple[int, int, int]:
    """The key of a rank among all; how many are smaller, and how many are equal."""
    if not 0 <= rank < keys.size:
        raise changed()
    key = np.partition(keys, rank)[rank]
    return int(key), int(np.count_nonzero(keys < key)), int(np.count_nonzero(keys == key))


def _refuse_nan(ranked: Ranked, num_numbers: Tensor) -> None:
    """Raise ValueError if a parameter has fewer numbers than live elements."""
    num_nan = torch.tensor(ranked.num_live) - num_numbers
    refuse_nan_in(ranked.names, ranked.num_live, num_nan.tolist())


def refuse_nan_in(names: Sequence[str], num_live: Sequence[int], num_nan: Sequence[int]) -> None:
    """Raise ValueError for the parameters that have NaN among their live elements."""
    where = {
        name: f"{nan} of {live}"
        for name, live, nan in zip(names, num_live, num_nan, strict=True)
        if nan
    }
    if where:
        parameters = ", ".join(f"{name} ({count})" for name, count in where.items())
        raise UnfitScores(
            f"the scores of {parameters} are NaN; expected numbers for every unpruned "
            "element. NaN has no place in a ranking: repair the weights, or mask them first "
            "with custom_from_mask.",
            "nan",
            where,
        )
