"""The search for the last key before the cut: a bracket around it, then radix selection inside.

1. a sample brackets the k-th key;
2. one scan counts the keys below the bracket, and collects those inside it;
3. the k-th key is radix-selected among the collected ones;
4. the ties at that key are cut by parameter, then by index, the same way.

The sample affects the speed only, not the result: when a bracket misses, the next one lies inside
the interval that exact counts leave.

Radix selection: intervals of keys shrink around the keys of given ranks, many side by side.

     low                                            high
      |---|-------|-------|-------|--x----|-------|--|       bins of 2**shift keys
                                  |       |
                                 low     high                the next interval: the bin of the key

The keys of each bin are counted, over all ranks. The edges of bins are multiples of 2**shift, so
that the bin of a key is ``(key >> shift) - (low >> shift)``.

Sources: Floyd and Rivest, "Expected time bounds for selection", CACM 1975; Alabi et al., "Fast
k-selection algorithms for graphics processing units", JEA 2012.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.memory import Array
from distprune.ranking.passes import ALL, Cuts, OwnedKeys, Passes
from distprune.ranks.collectives import Communicator

# Up to so many elements in all are collected outright: a sample would not pay.
COLLECT_ALL = 1 << 16
# A bracket this many standard deviations wide misses about once in a million.
_SIGMAS = 5.0
# Bits of a key that one histogram decides: 2049 counts are 16 KiB to sum over ranks.
_BITS = 11
# Keys that are binned at a time: the widened copy of them stays in the cache.
_CHUNK = 1 << 15


class ChangedError(RuntimeError):
    """The scores changed between two reads."""

    def __init__(self) -> None:
        super().__init__(
            "the counts of the scores disagree between two reads; expected scores that do not "
            "change during the call. Stop asynchronous updates, and make score functions pure."
        )


class Intervals(NamedTuple):
    """Closed intervals of keys; int64 [n] each.

    Attributes:
        low, high: the ends.
        rank: how many keys of the interval come before the wanted one, which lies in it.
        size: how many keys the interval holds.
    """

    low: Array
    high: Array
    rank: Array
    size: Array

    def at(self, rows: Array) -> Intervals:
        """Some of the intervals."""
        return Intervals(*(each[rows] for each in self))

    @property
    def shift(self) -> Array:
        """A bin of the next histogram holds 2**shift keys."""
        # Of keys of 64 bits, the difference fits into an unsigned number only.
        width = (self.high - self.low).view(np.uint64).astype(np.float64)
        shift: Array = np.maximum(0, np.frexp(width)[1].astype(np.int64) - _BITS)
        return shift

    @property
    def num_bins(self) -> int:
        """Bins of the next histogram, of the interval that has most."""
        return int(((self.high >> self.shift) - (self.low >> self.shift)).max()) + 1

    def histogram(self, keys: Iterable[OwnedKeys]) -> Array:
        """int64 [n, num_bins]: this rank's keys in the bins of every interval."""
        shift, num_bins = self.shift, self.num_bins
        # Added to key >> shift, it gives the place of the bin among those of all intervals.
        first = np.arange(len(shift)) * num_bins - (self.low >> shift)
        counts: Array = np.zeros(len(shift) * num_bins, dtype=np.int64)
        for owners, several in keys:
            if not memory.takes_numpy(several.device):
                table = torch.from_numpy(np.stack([self.low, self.high, shift, first]))
                low, high, shifts, firsts = table.to(several.device)[:, owners]
                wide = several.long()
                places = torch.where((wide >= low) & (wide <= high), (wide >> shifts) + firsts, -1)
                found = torch.bincount(places + 1, minlength=counts.size + 1)[1:]
                counts += found.cpu().numpy()
                continue
            for start in range(0, several.numel(), _CHUNK):
                some = several[start : start + _CHUNK].numpy()
                own: Any = owners
                if isinstance(owners, Tensor):
                    own = owners[start : start + _CHUNK].numpy()
                is_inside = (some >= self.low[own]) & (some <= self.high[own])
                if not is_inside.all():
                    some = some[is_inside]
                    own = own if isinstance(own, int) else own[is_inside]
                places = (some.astype(np.int64) >> shift[own]) + first[own]
                counts += np.bincount(places, minlength=counts.size)
        return counts.reshape(len(shift), num_bins)

    def narrowed(self, histogram: Array) -> Intervals:
        """Step into the bins that hold the wanted keys.

        Raises:
            ChangedError: a histogram does not hold as many keys as its interval.
        """
        upto, shift = histogram.cumsum(axis=1), self.shift
        if ((upto[:, -1] != self.size) | (self.rank >= self.size)).any():
            raise ChangedError
        rows = np.arange(len(shift))
        number = (upto <= self.rank[:, None]).sum(axis=1)
        size = histogram[rows, number]
        start = ((self.low >> shift) + number) << shift
        return Intervals(
            np.maximum(self.low, start),
            np.minimum(self.high, start + (1 << shift) - 1),
            self.rank - upto[rows, number] + size,
            size,
        )

    def descend(
        self,
        keys: Callable[[Intervals], Iterable[OwnedKeys]],
        ranks: Communicator,
        enough: Array | int = 0,
    ) -> Intervals:
        """Narrow every interval to one key, or to at most ``enough`` keys. Collective.

        Args:
            keys: a local step, called for each histogram: this rank's keys in these intervals.
            ranks: the ranks that have the keys.

        Cost: all-reduces of up to 16 KiB for each interval, one for 11 bits of its keys.
        """
        found = Intervals(*(each.copy() for each in self))
        while (rows := ((found.low < found.high) & (found.size > enough)).nonzero()[0]).size:

            def count(rows: Array = rows) -> Tensor:
                return torch.from_numpy(found.histogram(keys(found))[rows].reshape(-1))

            histogram = ranks.reduce(len(rows) * found.num_bins, count).numpy()
            narrowed = found.at(rows).narrowed(histogram.reshape(len(rows), -1))
            for whole, part in zip(found, narrowed, strict=True):
                whole[rows] = part
        return found


class Search:
    """The search for the last key before the cut of some segments, side by side.

    Args:
        segments: int64 [parameters], the segment of each; -1: none.
        k: int64 [segments], how many elements go.
        totals: int64 [segments], live elements.

    The key of each segment lies in [low, high]. Elements of all ranks with smaller keys are
    ``below``, with keys up to high ``upto``; of each parameter, this rank has ``each`` of both.
    Once they are few, the keys in the interval ``are_collected``.
    """

    def __init__(self, ranking: Passes, segments: Array, k: Array, totals: Array) -> None:
        self._ranking, self._ranks, self._totals, self._k = ranking, ranking.ranks, totals, k
        self._segments, self._members = segments, segments >= 0
        keys, size = ranking.keys, len(k)
        self._low: Array = np.full(size, keys.low)
        self._high = np.where(
            k > 0, keys.largest_number if ranking.refuses_nan else keys.high, keys.low
        )
        self._below: Array = np.zeros(size, dtype=np.int64)
        self._upto = np.where(k > 0, totals, 0)
        self._each: Array = np.zeros((2, len(segments)), dtype=np.int64)
        self._are_collected: Array = np.zeros(size, dtype=bool)
        self._num_missed: Array = np.zeros(size, dtype=np.int64)
        self._num_scans = 0

    def cut(self, count_each: bool, drafts: bool) -> Cuts:
        """See :meth:`Ranking.cut`."""
        checked = self._ranking.nan_checked
        while True:
            counts_nan = self._ranking.refuses_nan and not checked[self._members].all()
            is_open = (self._low < self._high) & ~self._are_collected
            if not (counts_nan or is_open.any()):
                return self._cut_ties(self._find_keys(), count_each)
            edges, share = self._bracket(is_open)
            self._scan(is_open, edges, share, drafts and not count_each, counts_nan)
            checked[self._members] = True

    def _bracket(self, is_open: Array) -> tuple[Array, Array]:
        """Choose what a scan collects around the k-th key of each segment, and what it counts.

             low            first  k-th  last             high
              |--------------[------x-----]----------------|
                   counted      collected       counted

        The same on every rank, because it depends on summed histograms only.

        Returns:
            The edges for a scan, int64 [segments, n]; and about which fraction is collected.
        """
        inside, most = self._upto - self._below, self._ranking.most_collected
        last = np.where(is_open | self._are_collected, self._high, self._low - 1)
        edges, share = np.array([self._low - 1, last]).T, inside / np.maximum(self._totals, 1)
        is_sampled = is_open & (inside > min(COLLECT_ALL, most))
        if self._num_scans and most < math.inf:
            is_sampled &= inside > most
        return self._sampled(is_sampled, edges, share) if is_sampled.any() else (edges, share)

    def _sampled(self, is_sampled: Array, edges: Array, share: Array) -> tuple[Array, Array]:
        """:meth:`_bracket` of segments that have too many elements to be collected outright."""
        rows = is_sampled.nonzero()[0]
        inside, totals = (self._upto - self._below)[rows], self._totals[rows]
        # 4 n^(2/3) balances the cost of the sample and of the keys that are collected.
        rates = np.maximum(4096.0, 4 * totals ** (2 / 3)) * 2.0 ** self._num_missed[rows] / totals
        row_of: Array = np.full(len(self._k) + 1, -1)  # the last: of no segment
        row_of[rows] = np.arange(len(rows))
        row_of = row_of[self._segments]
        samples: list[OwnedKeys] = []
        none = np.zeros(len(rows), dtype=np.int64)
        whole = Intervals(self._low[rows], self._high[rows], none, none)

        def sample() -> Tensor:
            rate = np.where(row_of < 0, 0.0, np.minimum(rates, 1.0)[row_of])
            samples.extend(self._ranking.sample(row_of, rate, self._num_scans))
            return torch.from_numpy(whole.histogram(samples).reshape(-1))

        histogram = self._ranks.reduce(len(rows) * whole.num_bins, sample).numpy()
        histogram = histogram.reshape(len(rows), -1)
        size = histogram.sum(axis=1)
        centre = (self._k - self._below)[rows] / inside * size
        spread_ = np.sqrt(np.maximum(centre * (1 - centre / np.maximum(size, 1)), 0.0))
        margin = _SIGMAS * spread_ + 4
        # The first and the last key of each bracket, where the sample has them.
        ranks = np.concatenate([np.floor(centre - margin), np.ceil(centre + margin)]).astype(
            np.int64
        )
        sizes = np.tile(size, 2)
        is_known = (ranks >= 0) & (ranks < sizes)
        ends = np.concatenate([whole.low, whole.high])
        found = Intervals(ends, ends.copy(), np.tile(none, 2), np.tile(none, 2))
        start = Intervals(np.tile(whole.low, 2), np.tile(whole.high, 2), ranks, sizes).at(is_known)
        for all_, known in zip(
            found, start.narrowed(np.tile(histogram, (2, 1))[is_known]), strict=True
        ):
            all_[is_known] = known
        both = [(own + n * len(rows), keys) for n in (0, 1) for own, keys in samples]
        found = found.descend(lambda _: both, self._ranks, np.tile(margin / 5, 2))
        first, last = found.low[: len(rows)], found.high[len(rows) :]
        num_inside = 2 * margin + found.size.reshape(2, -1).sum(axis=0)
        expected = np.minimum(size, num_inside) / np.maximum(size, 1) * inside
        most = np.minimum(most_inside(totals), self._ranking.most_collected)
        is_narrow = (size > 0) & (expected <= most)
        edges[rows, 0], edges[rows, 1] = first - 1, last
        share[rows] = expected / totals
        # A key with many elements is at an edge; or all is spread out, and is cut into eight.
        wide: dict[int, list[int]] = {}
        for row, low, high in zip(
            rows[~is_narrow].tolist(),
            first[~is_narrow].tolist(),
            last[~is_narrow].tolist(),
            strict=True,
        ):
            step = max(1, (high - low + 1) // 8)
            pivots = {low - 1, low, high - 1, high, *(low + step * i - 1 for i in range(8))}
            inner = sorted(p for p in pivots if self._low[row] <= p <= min(high, self._high[row]))
            wide[row] = [inner[0], *inner]  # nothing lies between the first two
        if wide:
            width = max(map(len, wide.values()))
            edges = np.concatenate([edges, np.repeat(edges[:, 1:], width - 2, axis=1)], axis=1)
            for row, own in wide.items():
                edges[row] = own + own[-1:] * (width - len(own))
        return edges, share

    def _scan(
        self, is_open: Array, edges: Array, share: Array, drafts: bool, counts_nan: bool
    ) -> None:
        """Read everything once, and narrow the open segments to where their keys must be."""
        ranking, members, width = self._ranking, self._members, edges.shape[1]
        own: Array = np.zeros(0)

        def read() -> Tensor:
            nonlocal own
            own = ranking.scan(
                members, np.where(members, edges[self._segments].T, self._ranking.keys.low - 1).T,
                share[self._segments], drafts=drafts, counts_nan=counts_nan,
            )  # fmt: skip
            return torch.from_numpy(sums_of(self._segments, own, len(is_open)).reshape(-1))

        totals = self._ranks.reduce((width + 1) * len(is_open), read).numpy()
        totals = totals.reshape(width + 1, -1)
        if totals[-1].any():
            num_nan = self._ranks.reduce(len(members), lambda: torch.from_numpy(own[-1]))
            ranking.raise_nan(num_nan.tolist())
        self._num_scans += 1
        # With the ends of the interval, whose counts are known.
        keys = np.concatenate([[self._low - 1], edges.T, [self._high]])
        upto = np.concatenate([[self._below], totals[:-1], [self._upto]])
        each = np.concatenate([self._each[:1], own[:-1], self._each[1:]])
        if ((upto[1:] < upto[:-1]) & is_open).any():
            raise ChangedError
        # The first edge up to which there are k keys.
        at = np.where(is_open, (upto < self._k).sum(axis=0), 1)
        numbers, before = np.arange(len(is_open)), at - 1
        low, high = keys[before, numbers] + 1, keys[at, numbers]
        is_hit = is_open & (low == edges[:, 0] + 1) & (high == edges[:, 1])
        self._num_missed += is_open & ~is_hit & (edges[:, 0] < edges[:, 1])
        self._are_collected |= is_hit
        self._low, self._high = np.where(is_open, [low, high], [self._low, self._high])
        counts = [upto[before, numbers], upto[at, numbers]]
        self._below, self._upto = np.where(is_open, counts, [self._below, self._upto])
        ends, numbers = at[self._segments], np.arange(len(members))
        is_narrowed = is_open[self._segments] & members
        found = [each[ends - 1, numbers], each[ends, numbers]]
        self._each = np.where(is_narrowed, found, self._each)

    def _collected(self) -> list[OwnedKeys]:
        """The keys that the last scan collected and this rank counts, by their segments."""
        found: list[OwnedKeys] = []
        for own in self._ranking.collected:
            if own.is_counted:
                keys, owners = own.joined, cast("int | Tensor", 0)
                if len(self._k) > 1:
                    owners = memory.moved(torch.from_numpy(self._segments[own.shards]), keys.device)
                found.append((owners, keys))
        return found

    def _find_keys(self) -> Intervals:
        """The k-th key of each segment, its rank among its ties, and their number."""
        found = Intervals(
            self._low, self._high, self._k - 1 - self._below, self._upto - self._below
        )
        keys = self._collected()
        if (
            self._ranks.size > 1
            or not self._ranking.is_on_host
            or len(keys) != 1
            or len(self._k) > 1
        ):
            return found.descend(lambda _: keys, self._ranks)
        if self._are_collected[0]:  # a rank that is alone selects among the keys themselves
            numbers, rank = keys[0][1].numpy(), int(found.rank[0])
            if not 0 <= rank < numbers.size == found.size[0]:
                raise ChangedError
            key = np.partition(numbers, rank)[rank]
            rank -= int(np.count_nonzero(numbers < key))
            count = int(np.count_nonzero(numbers == key))
            found = Intervals(*np.array([[key], [key], [rank], [count]], dtype=np.int64))
        return found

    def _cut_ties(self, found: Intervals, count_each: bool) -> Cuts:
        """The cut of each segment: of its key's ties, the first ones go."""
        members, segments, num_shards = self._members, self._segments, len(self._members)
        num_pruned = found.rank + 1
        # Where nothing goes, the lowest key is the threshold, and the index 0.
        threshold = np.where(members, found.low[segments], self._ranking.keys.low)
        index = np.where(members & (num_pruned > 0)[segments], ALL, 0)
        num_before: Array = np.zeros(num_shards, dtype=np.int64)
        cuts = Cuts(threshold, index, np.array([found.low, found.size, num_pruned]).T, num_before)
        is_divided = (num_pruned > 0) & (num_pruned < found.size)
        if not (count_each or is_divided.any()):
            return cuts
        are_collected = members & self._are_collected[segments]
        tied: list[tuple[Array, Array]] = []  # shards and positions of collected ties

        def count() -> Tensor:
            smaller, ties = self._each[0].copy(), self._each[1] - self._each[0]
            ties[are_collected] = 0
            for own in self._ranking.collected:
                if own.is_counted:
                    shards, positions = own.ties(threshold)
                    is_here = are_collected[shards]
                    tied.append((shards[is_here], positions[is_here]))
                    ties += np.bincount(tied[-1][0], minlength=num_shards)
                    if count_each:
                        shards = own.shards
                        is_below = own.joined.cpu().numpy() < threshold[shards]
                        below = shards[is_below & are_collected[shards]]
                        smaller += np.bincount(below, minlength=num_shards)
            return torch.from_numpy(np.concatenate([ties, smaller] if count_each else [ties]))

        shared = self._ranks.reduce(num_shards * (1 + count_each), count).numpy()
        ties = shared[:num_shards]
        if (sums_of(segments, ties, len(self._k)) != found.size).any():
            raise ChangedError
        # Ties go parameter by parameter, until enough of them are pruned.
        order = members.nonzero()[0]
        order = order[segments[order].argsort(kind="stable")]
        own, of_each = segments[order], ties[order]
        before = of_each.cumsum() - of_each - (found.size.cumsum() - found.size)[own]
        gone = (num_pruned[own] - before).clip(0, of_each)
        num_before[order] = shared[num_shards:][order] + gone if count_each else gone
        is_all = ~is_divided[own] | ((before < num_pruned[own]) & (gone == of_each))
        index[order] = np.where((num_pruned > 0)[own] & is_all, ALL, 0)
        # The parameters inside of which ties are cut: by radix selection over their indices.
        is_cut = (gone > 0) & (gone < of_each)
        shards = order[is_cut]
        if shards.size:
            last = np.array([self._ranking.shards[i].numel - 1 for i in shards])
            start = Intervals(np.zeros_like(last), last, gone[is_cut] - 1, of_each[is_cut])
            collected: dict[int, list[OwnedKeys]] = {}

            def indices(now: Intervals) -> Iterator[OwnedKeys]:
                for row, i in enumerate(shards.tolist()):
                    if are_collected[i]:
                        if i not in collected:
                            to_index = self._ranking.shards[i].index
                            collected[i] = [
                                (row, to_index(torch.from_numpy(positions[numbers == i])))
                                for numbers, positions in tied
                            ]
                        yield from collected[i]
                    elif now.low[row] < now.high[row]:
                        key, low, high = int(threshold[i]), int(now.low[row]), int(now.high[row])
                        for several in self._ranking.ties_of(i, key, low, high):
                            yield row, several

            index[shards] = start.descend(indices, self._ranks).low + 1
        return cuts


def most_inside(totals: Array) -> Array:
    """int64 [segments]: how many elements a bracket may have, of segments of so many."""
    most: Array = np.maximum(COLLECT_ALL, totals // 50)
    return most


def sums_of(segments: Array, numbers: Array, num_segments: int) -> Array:
    """int64 [..., segments]: the sums of numbers, [..., parameters], of their members."""
    # The last sum is that of what is in no segment.
    sums: Array = np.zeros((*numbers.shape[:-1], num_segments + 1), dtype=np.int64)
    np.add.at(sums.T, segments, numbers.T)
    return sums[..., :-1]
