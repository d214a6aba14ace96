"""Exact ranking over all ranks: where the total order is cut after k elements.

The order is (key of the score, position of the parameter in the caller's list,
row-major index in the whole parameter). Ranks exchange counts and histograms,
never scores:

1. a sample brackets the k-th key;
2. one scan counts the keys below the bracket, collects those inside it, and drafts the masks;
3. the k-th key is radix-selected among the collected ones (descent.py);
4. the ties at that key are cut by parameter, then by index, the same way.

The sample affects the speed only, not the result: when a bracket misses, the next one lies inside
the interval that exact counts leave. Several segments (some parameters and a count: a layer, or all
of them) are cut side by side, with the same reads and the same all-reduces.

[Note: draft] The scan also writes masks, as if the order were cut where the bracket begins. Once
the cut is known, only the elements that were collected are corrected, a fraction of a percent:

    keys       0 ............ low ....... cut ....... high ............ max
    draft      0 0 0 0 0 0 0 | 1 1 1 1 1 1 1 1 1 1 1 1 | 1 1 1 1 1 1 1 1
    final      0 0 0 0 0 0 0 | 0 0 0 0 0 0 1 1 1 1 1 1 | 1 1 1 1 1 1 1 1
                              collected: visited again

Small shards, many of them in a chunk, are not drafted: they are read again, in the cache.

Source of the sample: Floyd and Rivest, "Expected time bounds for selection", CACM 1975.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.memory import SERIAL, Array, Runs, Scratch, on_host
from distprune.base.naming import UnfitScores
from distprune.ranking.chunks import (
    Chunk,
    Elements,
    Flags,
    chunks_of,
    joined_tensors,
    operations_on,
    pieces_in,
    visit,
)
from distprune.ranking.descent import ChangedError, Descent
from distprune.ranking.keys import KeyRange
from distprune.ranking.scores import KeySource, load_joined
from distprune.ranks.collectives import Communicator

# A bracket this many standard deviations wide misses about once in a million.
_SIGMAS = 5.0
# Up to so many elements in all are collected outright: a sample would not pay.
COLLECT_ALL = 1 << 16
# Neighbours that are sampled together, as a cache line brings them anyway; one by one from
# chunks of fewer elements than the second number.
_RUN, _SMALL = 16, 4096
# An index above all.
_ALL = 1 << 62
# What a scan of a chunk returns: see cpu.scan.
Scanned = tuple[list[list[memory.Count]], Tensor, Tensor]
# Keys that segments side by side may collect, over all ranks.
_STORED = 1 << 24


@dataclass(frozen=True)
class ShardCut:
    """Where one parameter is cut.

    Attributes:
        threshold: elements with a smaller key go, with a larger one stay ...
        index: ... and with this key, those with a smaller global index go.
        bound: "min_sparsity" or "max_sparsity" if this bound decided how many elements are pruned;
            None if the common cut did.
    """

    threshold: int
    index: int
    bound: str | None = None


@dataclass(frozen=True)
class Cut:
    """Where the order of a segment is cut, and facts that are the same on all ranks.

    Attributes:
        threshold: elements with a smaller key go, with a larger one stay.
        position: among equal keys, parameters before this one (in the caller's list) go ...
        index: ... and of this one, the elements with a smaller global index.
        num_ties: elements whose key equals the threshold; ...
        num_ties_pruned: ... and how many of them come before the cut.
        num_before: if asked for, the elements before the cut of each parameter of the segment.
    """

    threshold: int
    position: int
    index: int
    num_ties: int = 0
    num_ties_pruned: int = 0
    num_before: tuple[int, ...] = ()

    def at(self, position: int, bound: str | None = None) -> ShardCut:
        """Where a parameter is cut."""
        index = _ALL if position < self.position else 0
        return ShardCut(self.threshold, self.index if position == self.position else index, bound)


class _Collected(NamedTuple):
    """Live elements of a run of one shard whose keys lie in its interval.

    Attributes:
        start: the flat position that ``positions`` count from.
        positions: int32 [m].
        keys: [m].
        is_counted: whether this rank counts them.
    """

    start: int
    positions: Tensor
    keys: Tensor
    is_counted: bool

    def at(self, key: int) -> Tensor:
        """int64: the positions of a key."""
        return memory.select(self.positions, torch.as_tensor(_raw(self.keys) == key)).long()


@dataclass(eq=False)
class _Search:
    """The search for the k-th key of a segment, which lies in [low, high].

    Attributes:
        members: the positions of its parameters.
        k: how many elements go.
        below, upto: elements of all ranks with keys < low, and <= high ...
        each_below, each_upto: ... and those of this rank, per parameter of the ranking.
        total: live elements.
        interval: keys that the scan collects; None: it counts only.
        pivots: keys that it counts up to.
        share: about which fraction of the elements lies in the interval.
        num_missed: how many intervals have missed the key; each doubles the sample.
        histogram: of the keys in the interval.
    """

    members: Sequence[int]
    k: int
    low: int
    high: int
    below: int
    upto: int
    each_below: Array
    each_upto: Array
    total: int
    interval: tuple[int, int] | None = None
    pivots: list[int] = field(default_factory=list)
    share: float = 0.0
    num_scans: int = 0
    num_missed: int = 0
    histogram: Array | None = None

    @property
    def is_open(self) -> bool:
        """Whether a scan has to find out more."""
        return self.k > 0 and self.low < self.high and self.histogram is None

    def narrow(self, counts: Sequence[int], each: Array) -> None:
        """Go on where the key must be, after a scan.

        Args:
            counts: of all ranks: below the interval, inside it, NaN, up to each pivot.
            each: of this rank, per parameter: the same columns.
        """
        edges = {
            self.low - 1: (self.below, self.each_below),
            self.high: (self.upto, self.each_upto),
        }
        if self.interval is not None:
            inside = each[:, 0] + each[:, 1]
            edges[self.interval[0] - 1] = counts[0], each[:, 0]
            edges[self.interval[1]] = counts[0] + counts[1], inside
        edges |= {p: (counts[3 + i], each[:, 3 + i]) for i, p in enumerate(self.pivots)}
        around = [
            (first, last)
            for first, last in itertools.pairwise(sorted(edges))
            if edges[first][0] < self.k <= edges[last][0]
        ]
        if len(around) != 1:
            raise ChangedError
        ((start, self.high),) = around
        self.below, self.each_below = edges[start]
        self.upto, self.each_upto = edges[self.high]
        self.low = start + 1
        self.num_scans += 1
        if self.interval != (self.low, self.high):
            self.num_missed += self.interval is not None
            self.interval = self.histogram = None
            self.pivots = []


class Ranking:
    """All live elements of some shards, in the order (key, position of the parameter, index).

    Args:
        shards: this rank's part of every parameter, in the same order on all ranks.
        keys: the range of all keys, and the source of the keys of each shard.
        num_live: unpruned elements of every whole parameter.
        ranks: the ranks that have the shards.
        refuse_nan: whether a live NaN is an error; otherwise NaN rank last.
        most_collected: keys that all ranks together may collect in memory, about; None: any number.
    """

    def __init__(
        self,
        shards: Sequence[Elements],
        keys: tuple[KeyRange, Sequence[KeySource]],
        num_live: Sequence[int],
        ranks: Communicator,
        *,
        refuse_nan: bool = True,
        most_collected: int | None = None,
    ) -> None:
        self.shards = shards
        self.keys, self.sources = keys
        self.num_live = num_live
        self.ranks = ranks
        self._masks = [shard.flat_mask for shard in shards]
        self._most = math.inf if most_collected is None else most_collected
        self._refuse_nan = refuse_nan
        # Parameters that may have NaN.
        self._unchecked = set(range(len(shards))) if refuse_nan and self.keys.is_float else set()
        self._on_host = all(memory.takes_numpy(source.device) for source in self.sources)
        # What the last scan found: see _read.
        self._each: Array = np.zeros((len(shards), 3), dtype=np.int64)
        self._collected: dict[int, list[_Collected]] = {}
        # Of each drafted mask, the interval that its scan collected.
        self._drafted: dict[int, tuple[int, int]] = {}

    def cut(
        self,
        segments: Sequence[Sequence[int]],
        counts: Sequence[int],
        *,
        drafts: Sequence[Tensor] | None = None,
        count_each: bool = False,
    ) -> list[Cut]:
        """Cut the order of each segment after exactly so many live elements. Collective.

        Args:
            segments: positions of the parameters of each, ascending; no parameter is in two.
            counts: elements before the cut, from 0 to the live elements of the segment.
            drafts: flat masks of all shards, uninitialised, to draft: see [Note: draft].
            count_each: whether to count ``Cut.num_before``.

        Raises:
            ValueError: a live score is NaN, and NaN are refused; names its parameters. On every
                rank.
            RuntimeError: the scores changed between two scans.

        Cost: one scan of the scores (more when a bracket misses, or more keys lie in it than may be
        collected) and about ten all-reduces of up to 32 KiB for each segment; memory for the
        collected keys, about 0.5 % of them at 10**8 elements and less above.
        """
        self._drafted = {}
        cuts: list[Cut] = []
        while len(cuts) < len(segments):
            stored, last = 0.0, len(cuts)
            while last < len(segments) and (last == len(cuts) or stored < _STORED):
                total = sum(self.num_live[i] for i in segments[last])
                stored += min(total, max(COLLECT_ALL, total / 50))
                last += 1
            if last - len(cuts) < len(segments):
                drafts = None  # what was collected to correct them is freed before
            several = slice(len(cuts), last)
            cuts += self._cut(segments[several], counts[several], drafts, count_each)
        return cuts

    def write(self, cuts: Sequence[ShardCut], outs: Sequence[Tensor]) -> list[int]:
        """Write the masks of this rank: zero what lies before the cuts, and no other live element.

        The one place where masks become final. Drafted masks are corrected; others are written.

        Args:
            cuts: of each shard.
            outs: flat masks, one per shard, contiguous; those that were drafted, if some were.

        Returns:
            Per shard, how many counted live elements were pruned.

        Cost: one pass over the shards without a valid draft; with one, over the collected elements.
        """
        totals: list[list[memory.Count]] = [[] for _ in cuts]
        drafted = {
            i for i, (low, high) in self._drafted.items() if low <= cuts[i].threshold <= high
        }
        for i in drafted:
            totals[i] = [int(self._each[i, 0])]
            for start, positions, keys, is_counted in self._collected[i]:
                cut, raw = cuts[i], _raw(keys)
                flags = raw <= cut.threshold if cut.index >= _ALL else raw < cut.threshold
                if 0 < cut.index < _ALL:
                    (ties,) = (torch.as_tensor(raw) == cut.threshold).nonzero(as_tuple=True)
                    indices = self.shards[i].index(positions[ties].long() + start)
                    flags[_raw(ties)] = _raw(indices < cut.index)
                number = operations_on(keys.device).zero(outs[i][start:], positions, flags)
                totals[i] += [number] if is_counted else []
        others = [i for i in range(len(cuts)) if i not in drafted]
        chunks = chunks_of(self.shards, self.sources, others, outs, only_counted=False)

        def write(chunk: Chunk, scratch: Scratch) -> list[memory.Count]:
            stay = self.kept(chunk, cuts, scratch)
            self.store(chunk, stay, outs)
            kept = operations_on(outs[chunk.shards[0]].device).count_pieces(stay, chunk.bounds)
            sizes = [stop - start for _, start, stop in chunk.pieces]
            return [size - number for size, number in zip(sizes, kept, strict=True)]

        for chunk, numbers in zip(chunks, visit(chunks, self.sources, write), strict=True):
            if chunk.is_counted:
                for i, number in zip(chunk.shards, numbers, strict=True):
                    totals[i].append(number)
        flat = iter(on_host([number for several in totals for number in several]))
        return [sum(next(flat) for _ in several) for several in totals]

    def kept(
        self, chunk: Chunk, cuts: Sequence[ShardCut] | Mapping[int, ShardCut], scratch: Scratch
    ) -> Flags:
        """Which elements of a chunk stay as they are after the cuts."""
        keys, _, live = self.load(chunk, scratch)
        operations = operations_on(keys.device)
        firsts = {i: cuts[i].threshold + int(cuts[i].index >= _ALL) for i in chunk.shards}
        stay = operations.kept(keys, live, chunk.each(firsts, _numpy_dtype(keys)), scratch)
        for (i, start, _), (first, last) in zip(
            chunk.pieces, itertools.pairwise(chunk.bounds), strict=True
        ):
            if 0 < cuts[i].index < _ALL:
                ties = operations.positions_of(keys[first:last], cuts[i].threshold)
                indices = self.shards[i].index(ties + start)
                gone = memory.select(ties, indices < cuts[i].index) + first
                if live is not None:
                    gone = memory.select(gone, memory.select(torch.as_tensor(live), gone))
                operations.clear(stay, gone)
        return stay

    def _cut(
        self,
        segments: Sequence[Sequence[int]],
        counts: Sequence[int],
        drafts: Sequence[Tensor] | None,
        count_each: bool,
    ) -> list[Cut]:
        """:meth:`cut` of segments whose keys are in memory together."""
        nothing: Array = np.zeros(len(self.shards), dtype=np.int64)
        high = self.keys.largest_number if self._refuse_nan else self.keys.high
        searches = []
        for members, k in zip(segments, counts, strict=True):
            total = sum(self.num_live[i] for i in members)
            searches.append(
                _Search(members, k, self.keys.low, high, 0, total, nothing, nothing, total)
            )
        members = [i for several in segments for i in several]
        checks_nan = not self._unchecked.isdisjoint(members)
        while checks_nan or any(search.is_open for search in searches):
            self._bracket([search for search in searches if search.is_open])
            self._scan(searches, members, drafts, checks_nan=checks_nan)
            self._unchecked.difference_update(members)
            checks_nan = False
        asked = [search for search in searches if search.k]
        found = dict(zip(map(id, asked), self._cut_ties(asked, count_each), strict=True))
        return [
            found.get(id(s)) or Cut(self.keys.low, 0, 0, num_before=(0,) * len(s.members))
            for s in searches
        ]

    def _histograms(
        self, descents: Sequence[Descent], keys_of: Callable[[int], Iterable[Tensor]]
    ) -> list[Array]:
        """The histograms of several descents over all ranks, by one all-reduce."""

        def count() -> Tensor:
            found = [each.histogram(keys_of(number)) for number, each in enumerate(descents)]
            return torch.from_numpy(np.concatenate(found))

        sizes = [each.num_bins for each in descents]
        shared = self.ranks.reduce(sum(sizes), count).numpy()
        return np.split(shared, np.cumsum(sizes)[:-1])

    def _bracket(self, searches: Sequence[_Search]) -> None:
        """Choose what to collect around the k-th key of each, and what to count.

             low            first  k-th  last             high
              |--------------[------x-----]----------------|
                   counted      collected       counted

        The same on every rank, because it depends on summed histograms only.
        """
        sampled = []
        for search in searches:
            inside = search.upto - search.below
            is_small = inside <= min(COLLECT_ALL, self._most)
            if is_small or (search.num_scans and inside <= self._most < math.inf):
                search.interval, search.share = (search.low, search.high), inside / search.total
            else:
                sampled.append(search)
        if not sampled:
            return
        samples: list[list[Tensor]] = []

        def sample(number: int) -> Sequence[Tensor]:
            if number == len(samples):
                samples.append(self._sample(sampled[number]))
            return samples[number]

        whole = [Descent(search.low, search.high, 0) for search in sampled]
        histograms = self._histograms(whole, sample)
        edges: dict[tuple[int, bool], Descent] = {}
        margins = []
        for number, (search, histogram) in enumerate(zip(sampled, histograms, strict=True)):
            size = int(histogram.sum())
            centre = (search.k - search.below) / (search.upto - search.below) * size
            spread = math.sqrt(max(centre * (1 - centre / max(1, size)), 0.0))
            margins.append(_SIGMAS * spread + 4)
            for is_last, rank in ((False, centre - margins[-1]), (True, centre + margins[-1])):
                rank = math.ceil(rank) if is_last else math.floor(rank)
                if 0 <= rank < size:
                    edge = replace(whole[number], rank=rank)
                    edges[number, is_last] = edge.narrowed(histogram)
        while wide := [
            at for at, edge in edges.items()
            if edge.low < edge.high and edge.count > margins[at[0]] / 5
        ]:  # fmt: skip
            found = self._histograms([edges[at] for at in wide], lambda i: samples[wide[i][0]])
            edges.update(
                {at: edges[at].narrowed(each) for at, each in zip(wide, found, strict=True)}
            )
        for number, (search, histogram) in enumerate(zip(sampled, histograms, strict=True)):
            size, inside = int(histogram.sum()), search.upto - search.below
            own = {is_last: edge for (n, is_last), edge in edges.items() if n == number}
            first = own[False].low if False in own else search.low
            last = own[True].high if True in own else search.high
            num_inside = 2 * margins[number] + sum(edge.count for edge in own.values())
            expected = min(size, num_inside) / max(1, size) * inside
            most = max(COLLECT_ALL, search.total // 50)
            if size and expected <= min(most, self._most):
                search.interval, search.share = (first, last), expected / search.total
                continue
            # A key with many elements is at an edge; or all is spread out, and is cut into eight.
            step = max(1, (last - first + 1) // 8)
            pivots = {first - 1, first, last - 1, last, *(first + step * i - 1 for i in range(8))}
            search.pivots = sorted(p for p in pivots if search.low <= p <= min(last, search.high))

    def _sample(self, search: _Search) -> list[Tensor]:
        """Keys of a part of the counted elements of a segment."""
        total = sum(self.shards[i].numel for i in search.members)
        # 4 n^(2/3) balances the cost of the sample and of the keys that are collected.
        rate = min(1.0, max(4096.0, 4 * total ** (2 / 3)) * 2**search.num_missed / total)
        generator = np.random.default_rng(search.num_scans)
        counted = {i: self.shards[i].counted for i in search.members}
        few = [i for i, own in counted.items() if len(own) <= SERIAL]
        chunks = chunks_of(self.shards, self.sources, few, only_counted=True)
        chunks += [
            Chunk([(i, own.start, own.stop)], True)
            for i, own in counted.items()
            if len(own) > SERIAL
        ]
        dead, scratch, found = self.keys.high + 1, Scratch(), []
        for chunk in chunks:
            ((i, start, _), *others), size = chunk.pieces, chunk.bounds[-1]
            length = _RUN if size >= _SMALL else 1
            exact = math.ceil(size * rate) / length
            num_drawn = min(size // length, int(exact) + int(generator.random() < exact % 1))
            if not num_drawn:
                continue
            # One run per stratum, jittered: regular data cannot hide between them.
            strata = np.arange(num_drawn) + generator.random(num_drawn)
            numbers = (strata * (size // length / num_drawn)).astype(np.int64)
            drawn = torch.from_numpy(np.minimum(numbers, size // length - 1))
            live: Tensor | None
            if not others:
                runs = Runs(start, start + size, length, drawn)
                keys, live = self.sources[i].gather(runs), self._masks[i]
                live = None if live is None else runs.of(live) == 1
            else:
                runs = Runs(0, size, length, drawn)
                keys, _, flags = self.load(chunk, scratch)
                keys = runs.of(keys)
                live = None if flags is None else runs.of(torch.as_tensor(flags))
            found.append(keys if live is None else torch.where(live, keys, dead))
        return found

    def load(self, chunk: Chunk, scratch: Scratch) -> tuple[Tensor, bool, Flags]:
        """The keys of a chunk, whether they may have NaN, and which elements compete."""
        sources = [self.sources[i] for i in chunk.shards]
        spans = [(start, stop) for _, start, stop in chunk.pieces]
        keys, may_have_nan = load_joined(sources, spans, scratch)
        if self._masks[chunk.shards[0]] is None:
            return keys, may_have_nan, None
        joined = joined_tensors(pieces_in(chunk, self._masks))
        return keys, may_have_nan, operations_on(keys.device).are_live(joined, scratch)

    def store(self, chunk: Chunk, stay: Flags, outs: Sequence[Tensor]) -> None:
        """Write the masks of a chunk: 0 where not ``stay``, elsewhere what they are, or 1."""
        targets = pieces_in(chunk, outs)
        previous = None
        if self._masks[chunk.shards[0]] is not None:
            previous = joined_tensors(pieces_in(chunk, self._masks))
        store = operations_on(targets[0].device).store
        if len(targets) == 1:
            store(targets[0], previous, stay)
            return
        if previous is not None or targets[0].dtype.is_complex:
            joined = torch.empty(chunk.bounds[-1], dtype=targets[0].dtype, device=targets[0].device)
            store(joined, previous, stay)
        else:
            joined = torch.as_tensor(stay)
        torch._foreach_copy_(targets, torch.split(joined, np.diff(chunk.bounds).tolist()))

    def _scan(
        self,
        searches: Sequence[_Search],
        members: Sequence[int],
        drafts: Sequence[Tensor] | None,
        *,
        checks_nan: bool,
    ) -> None:
        """Read everything once, and narrow the open searches."""
        fresh = [search for search in searches if search.is_open and search.interval is not None]
        descents = [Descent(*search.interval, 0) for search in fresh if search.interval is not None]
        # A rank that is alone selects among the keys themselves.
        if self.ranks.size == 1 and self._on_host:
            descents = []
        width = 3 + max(len(search.pivots) for search in searches)
        owners = np.repeat(np.arange(len(searches)), [len(s.members) for s in searches])

        def read() -> Tensor:
            self._read(searches, members, drafts, width, checks_nan=checks_nan)
            totals = np.zeros((len(searches), width), dtype=np.int64)
            np.add.at(totals, owners, self._each[members])
            found = [
                each.histogram(self._collected_keys(search))
                for each, search in zip(descents, fresh, strict=False)
            ]
            return torch.from_numpy(np.concatenate([totals.reshape(-1), *found]))

        sizes = [len(searches) * width, *(each.num_bins for each in descents)]
        shared = self.ranks.reduce(sum(sizes), read).numpy()
        totals, *histograms = np.split(shared, np.cumsum(sizes)[:-1])
        totals = totals.reshape(len(searches), width)
        if totals[:, 2].any():
            num_nan = self.ranks.reduce(
                len(self.shards), lambda: torch.from_numpy(self._each[:, 2])
            )
            refuse_nan([shard.name for shard in self.shards], self.num_live, num_nan.tolist())
        for search, histogram in itertools.zip_longest(fresh, histograms):
            search.histogram = histogram if histogram is not None else np.zeros(0, np.int64)
        for search, counts in zip(searches, totals.tolist(), strict=True):
            if search in fresh or search.is_open:
                search.narrow(counts, self._each)

    def _collected_keys(self, search: _Search) -> list[Tensor]:
        """The counted keys that the last scan collected of a segment."""
        return [
            found.keys for i in search.members for found in self._collected[i] if found.is_counted
        ]

    def _read(
        self,
        searches: Sequence[_Search],
        members: Sequence[int],
        drafts: Sequence[Tensor] | None,
        width: int,
        *,
        checks_nan: bool,
    ) -> None:
        """One pass: count per parameter, collect the keys in the intervals, draft the masks.

        ``_each`` becomes int64 [shards, width]: the counted live elements below the interval, those
        inside it, NaN, and those up to each pivot.
        """
        nothing = (self.keys.high + 1, self.keys.low - 1)
        intervals, shares = {}, {}
        # By parameter: the lowest and the highest key to collect, and each pivot.
        edges: list[dict[int, int]] = [{} for _ in range(width - 1)]
        for search in searches:
            interval = search.interval or nothing
            padded = [*search.pivots, *[nothing[1]] * (width - 3 - len(search.pivots))]
            for i in search.members:
                intervals[i], shares[i] = interval, search.share
                for column, edge in zip(edges, (*interval, *padded), strict=True):
                    column[i] = edge
        above = self.keys.largest_number if checks_nan else None
        only_counted = drafts is None
        chunks = chunks_of(self.shards, self.sources, members, only_counted=only_counted)
        chunks = [chunk for chunk in chunks if chunk.is_counted or len(chunk.pieces) == 1]

        def scan(chunk: Chunk, scratch: Scratch, *, waits: bool = False) -> Scanned:
            keys, may_have_nan, live = self.load(chunk, scratch)
            dtype, shards = _numpy_dtype(keys), chunk.shards
            low, high, *columns = (chunk.each(column, dtype) for column in edges)
            out = None
            if drafts is not None and len(shards) == 1 and self._masks[shards[0]] is None:
                (out,) = pieces_in(chunk, drafts)
                out = out if out.dtype is torch.bool else None
            capacity = min(len(keys), int(4 * shares[shards[0]] * len(keys)) + 1024)
            rows, positions, found, stay = operations_on(keys.device).scan(
                keys, live, (low, high), columns, above if may_have_nan else None,
                chunk.bounds, out, scratch, None if waits else capacity,
            )  # fmt: skip
            if drafts is not None and len(shards) == 1 and out is None:
                self.store(chunk, stay, drafts)
            return rows, positions, found

        scanned = visit(chunks, self.sources, scan)
        numbers = iter(on_host([n for rows, _, _ in scanned for row in rows for n in row]))
        self._each = np.zeros((len(self.shards), width), dtype=np.int64)
        self._collected = {i: [] for i in members}
        sizes = dict.fromkeys(members, 0)
        for chunk, (rows, positions, found) in zip(chunks, scanned, strict=True):
            counts = np.array([[next(numbers) for _ in row] for row in rows], dtype=np.int64)
            if chunk.is_counted:
                np.add.at(self._each, chunk.shards, counts.T)
            if len(chunk.pieces) == 1:
                sizes[chunk.shards[0]] += chunk.bounds[-1]
            if int(counts[1].sum()) > len(positions):
                _, positions, found = scan(chunk, Scratch(), waits=True)
            end = 0
            for (i, start, _), first, number in zip(
                chunk.pieces, chunk.bounds, counts[1].tolist(), strict=False
            ):
                here, end = slice(end, end + number), end + number
                if number:
                    own = _Collected(start - first, positions[here], found[here], chunk.is_counted)
                    self._collected[i].append(own)
        for i in members:
            self._drafted.pop(i, None)
            if drafts is not None and intervals[i] != nothing and sizes[i] == self.sources[i].size:
                self._drafted[i] = intervals[i]

    def _find_keys(self, searches: Sequence[_Search]) -> list[tuple[int, int, int]]:
        """Of each search the k-th key, how many keys are smaller, and how many are equal."""
        found = {
            id(search): (search.low, search.below, search.upto - search.below)
            for search in searches
            if search.histogram is None
        }
        collected = [search for search in searches if search.histogram is not None]
        keys = [self._collected_keys(search) for search in collected]
        if self.ranks.size == 1 and self._on_host:
            for search, own in zip(collected, keys, strict=True):
                numbers = memory.concatenate(own).numpy()
                rank = search.k - 1 - search.below
                if not 0 <= rank < numbers.size:
                    raise ChangedError
                key = np.partition(numbers, rank)[rank]
                num_below = int(np.count_nonzero(numbers < key))
                num_ties = int(np.count_nonzero(numbers == key))
                found[id(search)] = int(key), search.below + num_below, num_ties
        else:
            descents = []
            for search in collected:
                assert search.histogram is not None
                whole = Descent(search.low, search.high, search.k - 1 - search.below)
                descents.append(whole.narrowed(search.histogram))
            while wide := [n for n, each in enumerate(descents) if each.low < each.high]:
                histograms = self._histograms([descents[n] for n in wide], lambda i: keys[wide[i]])
                for n, histogram in zip(wide, histograms, strict=True):
                    descents[n] = descents[n].narrowed(histogram)
            for search, end in zip(collected, descents, strict=True):
                found[id(search)] = end.low, search.k - 1 - end.rank, end.count
        return [found[id(search)] for search in searches]

    def _cut_ties(self, searches: Sequence[_Search], count_each: bool) -> list[Cut]:
        """The cut of each search: of its key's ties, the first ones go."""
        found = self._find_keys(searches)
        cuts: list[Cut] = []
        asked = []  # searches that need the ties of each parameter
        both = zip(searches, found, strict=True)
        for number, (search, (key, num_below, num_ties)) in enumerate(both):
            cuts.append(Cut(key, search.members[-1] + 1, 0, num_ties, search.k - num_below))
            if count_each or (search.k - num_below < num_ties and len(search.members) > 1):
                asked.append(number)
        # Where the ties of a parameter are cut: its position, and how many of them go.
        inside = {
            number: (search.members[0], cut.num_ties_pruned)
            for number, (search, cut) in enumerate(zip(searches, cuts, strict=True))
            if cut.num_ties_pruned < cut.num_ties
        }
        sizes = [len(searches[number].members) for number in asked for _ in range(2)]

        def count() -> Tensor:
            pairs = [self._around(searches[n], cuts[n].threshold) for n in asked]
            return torch.from_numpy(np.concatenate([each for pair in pairs for each in pair]))

        if asked:
            shared = np.split(self.ranks.reduce(sum(sizes), count).numpy(), np.cumsum(sizes)[:-1])
            for number, smaller, ties in zip(asked, shared[::2], shared[1::2], strict=True):
                cut, members = cuts[number], searches[number].members
                upto = np.cumsum(ties)
                if int(upto[-1]) != cut.num_ties:
                    raise ChangedError
                # Ties go parameter by parameter, until enough of them are pruned.
                gone = np.minimum(np.maximum(cut.num_ties_pruned - (upto - ties), 0), ties)
                if count_each:
                    cuts[number] = replace(cut, num_before=tuple((smaller + gone).tolist()))
                if number in inside:
                    at = int(np.searchsorted(upto, cut.num_ties_pruned))
                    if gone[at] < ties[at]:
                        inside[number] = members[at], int(gone[at])
                    else:
                        del inside[number]
                        cuts[number] = replace(cuts[number], position=members[at] + 1)
        indices = self._cut_indices(
            {
                i: (cuts[number].threshold, k, searches[number].histogram is not None)
                for number, (i, k) in inside.items()
            }
        )
        for number, (i, _) in inside.items():
            cuts[number] = replace(cuts[number], position=i, index=indices[i])
        return cuts

    def _around(self, search: _Search, threshold: int) -> tuple[Array, Array]:
        """This rank's elements with smaller keys, and with this key, per parameter of a search."""
        members = list(search.members)
        if search.histogram is None:
            below = search.each_below[members]
            return below, search.each_upto[members] - below
        counts: list[memory.Count] = []
        owners = []
        for number, i in enumerate(members):
            for found in self._collected[i]:
                if found.is_counted:
                    count, raw = operations_on(found.keys.device).count_pieces, _raw(found.keys)
                    owners.append(number)
                    counts += count(raw < threshold, [0, len(raw)])
                    counts += count(raw == threshold, [0, len(raw)])
        both: Array = np.zeros((len(members), 2), dtype=np.int64)
        numbers = np.array(on_host(counts), dtype=np.int64).reshape(-1, 2)
        np.add.at(both, np.array(owners, dtype=np.int64), numbers)
        return self._each[members, 0] + both[:, 0], both[:, 1]

    def _cut_indices(self, wanted: dict[int, tuple[int, int, bool]]) -> dict[int, int]:
        """The global index below which exactly so many ties of a parameter lie.

        Radix selection over the indices of the ties. They are those that the scan has collected, or
        each step reads the parameter again, chunk by chunk: there may be too many for the memory.

        Args:
            wanted: by position of the parameter, the key, how many ties go (less than it has), and
                whether the scan has collected them.
        """
        descents = {
            i: Descent(0, self.shards[i].numel - 1, k - 1) for i, (_, k, _) in wanted.items()
        }
        collected: dict[int, list[Tensor]] = {}
        found: list[int] = []

        def indices(number: int) -> Iterable[Tensor]:
            i = found[number]
            key, _, is_collected = wanted[i]
            if not is_collected:
                return self._indices_of(i, key, descents[i].low, descents[i].high)
            if i not in collected:
                collected[i] = [
                    self.shards[i].index(own.at(key) + own.start).cpu()
                    for own in self._collected[i]
                    if own.is_counted
                ]
            return collected[i]

        while found := [
            i for i, each in descents.items()
            if each.low < each.high and each.rank != each.count - 1
        ]:  # fmt: skip
            histograms = self._histograms([descents[i] for i in found], indices)
            for i, histogram in zip(found, histograms, strict=True):
                descents[i] = descents[i].narrowed(histogram)
        return {i: each.high + 1 for i, each in descents.items()}

    def _indices_of(self, i: int, key: int, low: int, high: int) -> Iterator[Tensor]:
        """The global indices in [low, high], about, of this rank's ties in a parameter."""
        shard, scratch = self.shards[i], Scratch()
        first, last = 0, self.sources[i].size
        if shard.index.is_ascending:
            first, last = shard.index.positions_of(np.array([low, high + 1])).tolist()
        for chunk in chunks_of(self.shards, self.sources, [i], only_counted=True):
            ((_, start, stop),) = chunk.pieces
            part = Chunk([(i, max(start, first), min(stop, last))], True)
            if part.bounds[-1] <= 0:
                continue
            keys, _, live = self.load(part, scratch)
            at = operations_on(keys.device).positions_of(keys, key)
            if live is not None:
                at = memory.select(at, memory.select(torch.as_tensor(live), at))
            yield shard.index(at + part.pieces[0][1]).cpu()


def refuse_nan(names: Sequence[str], num_live: Sequence[int], num_nan: Sequence[int]) -> None:
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


def _raw(keys: Tensor) -> Any:
    """Keys as an array on a CPU, where torch would spread each comparison over threads."""
    return keys.numpy() if memory.takes_numpy(keys.device) else keys


def _numpy_dtype(keys: Tensor) -> np.dtype:
    return np.dtype(f"i{keys.itemsize}")
