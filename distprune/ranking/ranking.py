"""Exact ranking over all ranks: where the total order is cut after k elements.

The order is (key of the score, position of the parameter in the caller's list,
row-major index in the whole parameter). Ranks exchange counts and histograms,
never scores. Several segments (some parameters and a count: a layer, or
all of them) are cut side by side, with the same reads and the same all-reduces.

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

With floors and ceilings per parameter, the result is the cut of the total order at which
sum_i clamp(c_i, low_i, high_i) = k, where c_i is how many live elements of parameter i lie before
the cut, and low_i and high_i are how many this call has to, and may, prune of it. Each parameter
gives its lowest elements.

[Note: active set] Cut the order of the free parameters after k elements, without
regard to bounds. Let D = sum_i max(0, low_i - c_i) be what is missing at floors, and E
= sum_i max(0, c_i - high_i) what is too much at ceilings; clamping gives g = k + D - E
elements. No c_i decreases as the cut rises, and so neither does g. If D > E, then g > k, and
every cut that is right lies lower: a parameter that is below its floor here is below
it there too, and has low_i elements whatever the cut. So it is fixed, and k shrinks by
low_i. If E > D, the same holds of those above their ceiling. If D = E, then g = k: this
cut is right, and both are fixed. Each round but the last fixes a parameter, and what is left is
a smaller problem of the same kind with the same solution. All decisions are made on sums that
all ranks share.

Sources: Floyd and Rivest, "Expected time bounds for selection", CACM 1975; Alabi et al., "Fast
k-selection algorithms for graphics processing units", JEA 2012.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.amount import CEILING, FLOOR, Bounds
from distprune.base.memory import Array
from distprune.ranking.passes import ALL, Collected, Cuts, OwnedKeys, Passes
from distprune.ranks.collectives import Communicator

# Up to so many elements in all are collected outright: a sample would not pay.
COLLECT_ALL = 1 << 16
# A bracket this many standard deviations wide misses about once in a million.
_SIGMAS = 5.0
# Bits of a key that one histogram decides: 2049 counts are 16 KiB to sum over ranks.
_BITS = 11
# Keys that segments side by side may collect, over all ranks.
_STORED = 1 << 24
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

    @property
    def shift(self) -> Array:
        """A bin of the next histogram holds 2**shift keys."""
        # Of keys of 64 bits, the difference fits into an unsigned number only.
        width = (self.high - self.low).view(np.uint64).astype(np.float64)
        return np.maximum(0, np.frexp(width)[1].astype(np.int64) - _BITS)

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
        for owners, several, occurrences in keys:
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
                often = None if occurrences is None else occurrences[start : start + _CHUNK]
                low, high = self.low[own], self.high[own]
                if isinstance(own, int):  # with an element of int64, numpy would widen the keys
                    low, high = int(low), int(high)
                is_inside = (some >= low) & (some <= high)
                if not is_inside.all():
                    some = some[is_inside]
                    own = own if isinstance(own, int) else own[is_inside]
                    often = None if often is None else often[is_inside]
                places = (some.astype(np.int64) >> shift[own]) + first[own]
                # Sums of occurrences are float64, which is exact below 2**53.
                counts += np.bincount(places, often, counts.size).astype(np.int64, copy=False)
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
            with ranks.local_step(len(rows) * found.num_bins) as counts:
                counts.copy_(torch.from_numpy(found.histogram(keys(found))[rows].reshape(-1)))
            own = Intervals(*(each[rows] for each in found))
            narrowed = own.narrowed(counts.numpy().reshape(len(rows), -1))
            for whole, part in zip(found, narrowed, strict=True):
                whole[rows] = part
        return found


class Search:
    """The search for the last key before the cut of some segments, side by side.

    Args:
        segments: int64 [parameters], the segment of each; -1: none.
        k: int64 [segments], how many elements go.

    Attributes:
        most_inside: int64 [segments]: how many elements a bracket may have.

    The key of each segment lies in [low, high]. Elements of all ranks with smaller keys are
    ``below``, with keys up to high ``upto``; of each parameter, this rank has ``each`` of both.
    Once they are few, the keys in the interval ``are_collected``.
    """

    def __init__(self, ranking: Passes, segments: Array, k: Array) -> None:
        self._ranking, self._ranks, self._k = ranking, ranking.ranks, k
        self._segments, self.members = segments, segments >= 0
        self._totals = totals = sums_of(segments, ranking.num_live, len(k))
        self.most_inside = np.minimum(totals, np.maximum(COLLECT_ALL, totals // 50))
        keys, none = ranking.keys, np.zeros(len(k), dtype=np.int64)
        highest = keys.largest_number if ranking.refuses_nan else keys.high
        self._low, self._high = none + keys.low, np.where(k > 0, highest, keys.low)
        self._below, self._upto = none, totals * (k > 0)
        self._each: Array = np.zeros((2, len(segments)), dtype=np.int64)
        self._are_collected = none > 0
        self._num_missed, self._num_scans = none, 0

    @property
    def is_open(self) -> Array:
        """bool [segments]: which keys another scan has to find."""
        return (self._low < self._high) & ~self._are_collected

    @property
    def counts_nan(self) -> bool:
        """Whether the next scan counts NaN: they are refused, and were not looked for yet."""
        ranking = self._ranking
        return ranking.refuses_nan and not ranking.nan_checked[self.members].all()

    def bracket(self) -> tuple[Array, Array]:
        """Choose what a scan collects around the k-th key of each segment. Collective.

             low            first  k-th  last             high
              |--------------[------x-----]----------------|
                   counted      collected       counted

        The same on every rank, because it depends on summed histograms only.

        Returns:
            The edges for a scan, int64 [segments, n]; and about which fraction is collected.
        """
        is_open, most = self.is_open, self._ranking.most_collected
        inside = self._upto - self._below
        last = np.where(is_open | self._are_collected, self._high, self._low - 1)
        edges, share = np.array([self._low - 1, last]).T, inside / np.maximum(self._totals, 1)
        is_sampled = is_open & (inside > min(COLLECT_ALL, most))
        if self._num_scans and most < math.inf:
            is_sampled &= inside > most
        rows = is_sampled.nonzero()[0]
        if not rows.size:
            return edges, share
        # Of these there are too many elements to be collected outright.
        inside, totals = inside[rows], self._totals[rows]
        # 4 n^(2/3) balances the cost of the sample and of the keys that are collected.
        rates = np.maximum(4096.0, 4 * totals ** (2 / 3)) * 2.0 ** self._num_missed[rows] / totals
        row_of: Array = np.full(len(self._k) + 1, -1)  # the last: of no segment
        row_of[rows] = np.arange(len(rows))
        row_of = row_of[self._segments]
        none = np.zeros(len(rows), dtype=np.int64)
        whole = Intervals(self._low[rows], self._high[rows], none, none)
        with self._ranks.local_step(len(rows) * whole.num_bins) as counts:
            rate = np.where(row_of < 0, 0.0, np.minimum(rates, 1.0)[row_of])
            samples = self._ranking.sample(row_of, rate, self._num_scans)
            counts.copy_(torch.from_numpy(whole.histogram(samples).reshape(-1)))
        histogram = counts.numpy().reshape(len(rows), -1)
        size = histogram.sum(axis=1)
        centre = (self._k - self._below)[rows] / inside * size
        margin = _SIGMAS * np.sqrt(np.maximum(centre * (1 - centre / np.maximum(size, 1)), 0)) + 4
        # The first and the last key of each bracket, where the sample has them.
        ranks = np.array([np.floor(centre - margin), np.ceil(centre + margin)]).astype(np.int64)
        low, high, sizes = np.tile([whole.low, whole.high, size], 2)
        both = Intervals(low, high, ranks.clip(0, size - 1).reshape(-1), sizes)
        both = both.narrowed(np.tile(histogram, (2, 1)))
        owned = [(own + n * len(rows), keys, None) for n in (0, 1) for own, keys, _ in samples]
        both = both.descend(lambda _: owned, self._ranks, np.tile(margin / 5, 2))
        first = np.where(ranks[0] < 0, whole.low, both.low[: len(rows)])
        last = np.where(ranks[1] >= size, whole.high, both.high[len(rows) :])
        num_inside = 2 * margin + both.size.reshape(2, -1).sum(axis=0)
        expected = np.minimum(size, num_inside) / np.maximum(size, 1) * inside
        most = np.minimum(self.most_inside[rows], self._ranking.most_collected)
        edges[rows], share[rows] = np.array([first - 1, last]).T, expected / totals
        is_wide = (size == 0) | (expected > most)
        if is_wide.any():
            # A key with many elements is at an edge; or all is spread out, and is cut into eight.
            low, high = first[is_wide, None], last[is_wide, None]
            step = np.maximum(1, high // 8 - low // 8)
            inner = low + step * np.arange(1, 8) - 1
            pivots = np.sort(np.hstack([low, inner.clip(max=high), high - 1, high]), axis=1)
            edges = np.hstack([edges, np.repeat(edges[:, 1:], pivots.shape[1], axis=1)])
            # Nothing lies between the first two.
            edges[rows[is_wide]] = np.hstack([low - 1, low - 1, pivots])
        return edges, share

    def narrow(self, edges: Array, totals: Array, own: Array) -> None:
        """Narrow the open segments to where the counts of a scan say their keys are. Collective.

        Args:
            edges: that the scan had.
            totals: [n + 1, segments]: elements up to each edge, and NaN.
            own: [n + 1, parameters]: those of this rank.
        """
        is_open, members, width = self.is_open, self.members, edges.shape[1]
        if totals[-1].any():
            num_nan = self._ranks.reduce(len(members), lambda: torch.from_numpy(own[-1]))
            self._ranking.raise_nan(num_nan.tolist())
        self._ranking.nan_checked[members] = True
        self._num_scans += 1
        # With the ends of the interval, whose counts are known.
        keys = np.concatenate([[self._low - 1], edges.T, [self._high]])
        upto = np.concatenate([[self._below], totals[:-1], [self._upto]])
        each = np.concatenate([self._each[:1], own[:-1], self._each[1:]])
        if ((upto[1:] < upto[:-1]) & is_open).any():
            raise ChangedError
        # The first edge up to which there are k keys; segments that are not open stay as they are.
        at, numbers = (upto < self._k).sum(axis=0), np.arange(len(is_open))
        before, at = np.where(is_open, [at - 1, at], [[0], [width + 1]])
        self._low, self._high = keys[before, numbers] + 1, keys[at, numbers]
        self._below, self._upto = upto[before, numbers], upto[at, numbers]
        is_hit = is_open & (before == 1) & (at == 2)
        self._num_missed = self._num_missed + (is_open & ~is_hit & (edges[:, 0] < edges[:, 1]))
        self._are_collected = self._are_collected | is_hit
        ends = np.where(members, [before[self._segments], at[self._segments]], [[0], [width + 1]])
        self._each = each[ends, np.arange(len(members))]

    def find_in_tallies(self) -> None:
        """Find the k-th key of each segment among tallied keys. Collective."""
        tallies, limit = self._ranking.tallies, self._ranking.keys.largest_number
        if self.counts_nan:
            num_nan = [int(often[keys.numpy() > limit].sum()) for keys, often in tallies]
            self._ranking.raise_nan(
                self._ranks.reduce(len(tallies), lambda: torch.tensor(num_nan)).tolist()
            )
            self._ranking.nan_checked[:] = True
        own = [
            (segment, *tally)
            for segment, tally in zip(self._segments.tolist(), tallies, strict=True)
            if segment >= 0
        ]
        interval = Intervals(self._low, self._high, (self._k - 1).clip(0), self._upto)
        found = interval.descend(lambda _: own, self._ranks)
        self._low = self._high = found.low
        self._below = np.where(self._k > 0, self._k - 1 - found.rank, 0)
        self._upto = self._below + found.size
        for i, (keys, often) in enumerate(tallies):
            if self.members[i] and self._k[self._segments[i]] > 0:
                key, numbers = found.low[self._segments[i]], keys.numpy()
                self._each[:, i] = often[numbers < key].sum(), often[numbers <= key].sum()

    def _find_keys(self, collected: Sequence[Collected]) -> Intervals:
        """The k-th key of each segment, its rank among its ties, and their number."""
        found = Intervals(
            self._low, self._high, self._k - 1 - self._below, self._upto - self._below
        )
        keys: list[OwnedKeys] = []
        for own in collected:
            owners: int | Tensor = 0
            if len(self._k) > 1:
                owners = memory.moved(torch.from_numpy(self._segments[own.shards]), own.keys.device)
            keys.append((owners, own.keys, None))
        is_alone = self._ranks.size == 1 and self._ranking.is_on_host
        if not is_alone or len(keys) != 1 or len(self._k) > 1 or not self._are_collected[0]:
            return found.descend(lambda _: keys, self._ranks)
        # A rank that is alone selects among the keys themselves.
        numbers, rank = keys[0][1].numpy(), int(found.rank[0])
        if not 0 <= rank < numbers.size == found.size[0]:
            raise ChangedError
        key = np.partition(numbers, rank)[rank]
        rank -= int(np.count_nonzero(numbers < key))
        count = int(np.count_nonzero(numbers == key))
        return Intervals(*np.array([[key], [key], [rank], [count]], dtype=np.int64))

    def cut_ties(self, count_each: bool) -> Cuts:
        """The cut of each segment: of its key's ties, the first ones go. Collective."""
        collected = self._ranking.collected()
        found = self._find_keys(collected)
        members, segments, num_shards = self.members, self._segments, len(self.members)
        num_pruned = found.rank + 1
        # Where nothing goes, the lowest key is the threshold, and the index 0.
        threshold = np.where(members, found.low[segments], self._ranking.keys.low)
        index = np.where(members & (num_pruned > 0)[segments], ALL, 0)
        num_before: Array = np.zeros(num_shards, dtype=np.int64)
        cuts = Cuts(threshold, index, num_before)
        if len(num_pruned) == 1 and num_pruned.item() > 0:
            cuts.common = found.low.item(), found.size.item(), num_pruned.item()
        is_divided = (num_pruned > 0) & (num_pruned < found.size)
        if not (count_each or is_divided.any()):
            return cuts
        are_collected = members & self._are_collected[segments]
        # Per device, positions of collected ties, shard by shard, and where those of each begin.
        tied: list[tuple[Array, Array]] = []
        with self._ranks.local_step(num_shards * (1 + count_each)) as shared:
            smaller, ties = self._each[0].copy(), self._each[1] - self._each[0]
            ties[are_collected] = 0
            for keys in collected:
                numbers, positions = keys.ties(threshold)
                of_each = np.bincount(numbers, minlength=num_shards)
                ties += of_each * are_collected
                ordered = positions[numbers.argsort(kind="stable")]
                tied.append((ordered, np.concatenate([[0], of_each.cumsum()])))
                if count_each:
                    below = keys.shards[keys.keys.cpu().numpy() < threshold[keys.shards]]
                    smaller += np.bincount(below, minlength=num_shards) * are_collected
            own_counts = [ties, smaller] if count_each else [ties]
            shared.copy_(torch.from_numpy(np.concatenate(own_counts)))
        ties, *of_smaller = shared.numpy().reshape(-1, num_shards)
        if (sums_of(segments, ties, len(self._k)) != found.size).any():
            raise ChangedError
        # Ties go parameter by parameter, until enough of them are pruned.
        order = members.nonzero()[0]
        order = order[segments[order].argsort(kind="stable")]
        own, of_each = segments[order], ties[order]
        before = of_each.cumsum() - of_each - (found.size.cumsum() - found.size)[own]
        gone = (num_pruned[own] - before).clip(0, of_each)
        num_before[order] = gone + sum(each[order] for each in of_smaller)
        is_all = ~is_divided[own] | ((before < num_pruned[own]) & (gone == of_each))
        index[order] = np.where((num_pruned > 0)[own] & is_all, ALL, 0)
        # The parameters inside of which ties are cut: by radix selection over their indices.
        is_cut = (gone > 0) & (gone < of_each)
        shards = order[is_cut]
        if shards.size:
            last = np.array([self._ranking.shards[i].numel - 1 for i in shards])
            start = Intervals(np.zeros_like(last), last, gone[is_cut] - 1, of_each[is_cut])

            def indices(now: Intervals) -> Iterator[OwnedKeys]:
                for row, i in enumerate(shards.tolist()):
                    if are_collected[i]:
                        for ordered, begins in tied:
                            positions = torch.from_numpy(ordered[begins[i] : begins[i + 1]])
                            yield row, self._ranking.shards[i].index(positions), None
                    elif now.low[row] < now.high[row]:
                        key, low, high = int(threshold[i]), int(now.low[row]), int(now.high[row])
                        for ties in self._ranking.ties_of(i, key, low, high):
                            yield row, ties, None

            index[shards] = start.descend(indices, self._ranks).low + 1
        return cuts


def sums_of(segments: Array, numbers: Array, num_segments: int) -> Array:
    """int64 [..., segments]: the sums of numbers, [..., parameters], of their members."""
    # The last sum is that of what is in no segment.
    sums: Array = np.zeros((*numbers.shape[:-1], num_segments + 1), dtype=np.int64)
    np.add.at(sums.T, segments, numbers.T)
    return sums[..., :-1]


class Ranking(Passes):
    """All live elements of some shards, in the order (key, position of the parameter, index)."""

    def cut(
        self,
        segments: Sequence[int] | Array,
        counts: Sequence[int] | Array,
        *,
        count_each: bool = False,
    ) -> Cuts:
        """Cut the order of each segment after exactly so many live elements. Collective.

        Args:
            segments: the number of the segment of each parameter; -1: it stays as it is.
            counts: per segment, elements before the cut, from 0 to its live elements.
            count_each: count ``Cuts.num_before``, and draft no masks: see passes.[Note: draft].

        Raises:
            ValueError: a live score is NaN, and NaN are refused; names its parameters. On every
                rank.
            RuntimeError: the scores changed between two scans.

        Cost: one scan of the scores (more when a bracket misses, or more keys lie in it than may be
        collected) and about ten all-reduces of up to 32 KiB for each segment; memory for the
        collected keys, about 0.5 % of them at 10**8 elements and less above.
        """
        owners, k = np.asarray(segments), np.asarray(counts)
        search = Search(self, owners, k)
        num_stored = len(k) << _BITS if self.tallies else search.most_inside.sum()
        if len(k) < 2 or num_stored <= _STORED:
            if self.tallies:
                search.find_in_tallies()
            drafts = bool(self.outs) and not count_each
            while search.counts_nan or search.is_open.any():
                edges, share = search.bracket()
                with self.ranks.local_step((edges.shape[1] + 1) * len(k)) as shared:
                    of_shards = np.where(search.members, edges[owners].T, self.keys.low - 1).T
                    asked = of_shards, share[owners], drafts, search.counts_nan
                    own = self.scan(search.members, *asked)
                    shared.copy_(torch.from_numpy(sums_of(owners, own, len(k)).reshape(-1)))
                search.narrow(edges, shared.numpy().reshape(-1, len(k)), own)
            return search.cut_ties(count_each)
        half = len(k) // 2
        is_first = owners < half  # or in no segment
        first = self.cut(np.where(is_first, owners, -1), k[:half], count_each=count_each)
        last = self.cut(np.where(is_first, -1, owners - half), k[half:], count_each=count_each)
        return Cuts(
            np.where(is_first, first.threshold, last.threshold),
            np.where(is_first, first.index, last.index),
            np.where(is_first, first.num_before, last.num_before),
        )


def limits_for(
    k: int, bounds: Bounds, num_elements: Sequence[int], num_live: Sequence[int]
) -> Bounds:
    """What the bounds leave, given what is pruned already.

    Raises:
        ValueError: ``k`` elements do not suffice for the floors, or exceed the ceilings.
    """
    pruned = np.array(num_elements) - np.array(num_live)
    lowest, highest = (tuple((np.array(each) - pruned).clip(0).tolist()) for each in bounds)
    low, high = sum(lowest), sum(highest)
    if not low <= k <= high:
        raise ValueError(
            f"min_sparsity and max_sparsity allow for {low:,} to {high:,} more pruned elements, "
            f"and {k:,} are to be pruned ({sum(pruned) + k:,} of {sum(num_elements):,} after this "
            "call). Expected an amount within these bounds; change it, or the bounds."
        )
    return lowest, highest


def cut_within(
    ranking: Ranking, k: int, limits: Bounds
) -> tuple[Cuts, tuple[int, int, int] | None, list[str | None]]:
    """Choose exactly ``k`` elements in total order, each parameter within its limits. Collective.

    Args:
        ranking: what is ranked.
        k: elements before the cut, 0 <= k <= sum(ranking.num_live).
        limits: as :func:`limits_for` makes it.

    Returns:
        The cut of every parameter; that of the parameters that no bound decided: None if there are
        none, or if nothing is pruned of them; and the bound that decided how many elements of each
        parameter go, FLOOR or CEILING, or None.

    Raises:
        ValueError: a live score is NaN; names its parameters.

    Cost: a ranking of all parameters; one more of those that are left for each round of
    [Note: active set]; and one of each parameter that a bound decides, side by side.
    """
    lowest, highest = map(np.array, limits)
    is_free, left = np.ones(len(lowest), dtype=bool), k
    counts, bounds = np.zeros_like(lowest), np.full(len(lowest), None)
    common: Cuts | None = None
    while is_free.any():
        common = ranking.cut(np.where(is_free, 0, -1), [left], count_each=True)
        before = common.num_before
        clamped = before.clip(lowest, highest)
        total = int(clamped[is_free].sum())
        is_below = is_free & (before < lowest) & (total >= left)
        is_above = is_free & (before > highest) & (total <= left)
        is_decided = is_below | is_above
        if not is_decided.any():
            break
        bounds[is_below], bounds[is_above] = FLOOR, CEILING
        counts[is_decided] = clamped[is_decided]
        is_free &= ~is_decided
        left -= int(counts[is_decided].sum())
    numbers: list[str | None] = bounds.tolist()
    shared = common.common if common is not None and is_free.any() else None
    if common is not None and is_free.all():
        return common, shared, numbers
    alone = ranking.cut(np.where(is_free, -1, (~is_free).cumsum() - 1), counts[~is_free])
    if common is not None:
        alone.threshold[is_free] = common.threshold[is_free]
        alone.index[is_free] = common.index[is_free]
    return alone, shared, numbers
