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

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.memory import Array, Runs, Scratch
from distprune.base.naming import UnfitScores
from distprune.ranking.chunks import (
    Chunk,
    Elements,
    Flags,
    R,
    call_all,
    join_small,
    on_host,
    operations_on,
    spans_of,
    spread,
)
from distprune.ranking.descent import ChangedError, Intervals, OwnedKeys
from distprune.ranking.keys import KeyRange, to_keys
from distprune.ranking.scores import ScoreSource, TensorScores
from distprune.ranks.collectives import Communicator

# A bracket this many standard deviations wide misses about once in a million.
_SIGMAS = 5.0
# Up to so many elements in all are collected outright: a sample would not pay.
COLLECT_ALL = 1 << 16
# Neighbours that are sampled together, as a cache line brings them anyway; one by one from
# chunks of fewer elements than the second number.
_RUN, _SMALL = 16, 4096
# An index above all.
ALL = 1 << 62
# Keys that segments side by side may collect, over all ranks.
_STORED = 1 << 24


class Common(NamedTuple):
    """Where the order of a segment is cut.

    Attributes:
        threshold: the key of the last element that is pruned.
        num_ties: elements with this key ...
        num_ties_pruned: ... and those of them that are pruned.
    """

    threshold: int
    num_ties: int
    num_ties_pruned: int


@dataclass(frozen=True)
class Cuts:
    """Where the order is cut; the same on all ranks. int64 arrays.

    Attributes:
        threshold: of each parameter: elements with a smaller key go, with a larger one stay ...
        index: ... and with this key, those with a smaller global index go.
        segments: per segment, the numbers of :class:`Common`.
        num_before: of each parameter, the elements before the cut; zeros if they were not asked
            for.
    """

    threshold: Array
    index: Array
    segments: Array
    num_before: Array

    def common(self) -> Common:
        """The cut of the first segment, in Python's numbers."""
        return Common(*self.segments[0].tolist())


class _Collected:
    """The keys that a scan has collected on one device, chunk by chunk.

    Attributes:
        chunks: that they are in.
        keys, positions: per chunk: [m], and int32 [m], in the chunk.
        is_counted: whether this rank counts them.
    """

    def __init__(self, found: Sequence[tuple[Chunk, Array, Tensor, Tensor]]) -> None:
        self.chunks, counts, self.keys, self.positions = zip(*found, strict=True)
        self.is_counted = self.chunks[0].is_counted
        self._shards = np.concatenate([chunk.shards for chunk in self.chunks])
        self._counts = np.concatenate(counts)

    @property
    def joined(self) -> Tensor:
        """All keys, [m]."""
        return self.keys[0] if len(self.keys) == 1 else torch.cat(self.keys)

    @property
    def shards(self) -> Array:
        """int64 [m]: the number of the shard of each key."""
        return np.repeat(self._shards, self._counts)

    def ties(self, threshold: Array) -> tuple[Array, Array]:
        """The keys that equal the threshold of their shard: its number, and the position in it."""
        keys, positions = self.joined, torch.cat(self.positions)
        wanted = spread(threshold[self._shards], self._counts, keys.dtype)
        at = operations_on(keys.device).positions_of(keys, wanted)
        pieces = self._counts.cumsum().searchsorted(at.cpu().numpy(), side="right")
        starts = np.concatenate([chunk.starts for chunk in self.chunks])
        return self._shards[pieces], positions[at].cpu().numpy() + starts[pieces]


class Ranking:
    """All live elements of some shards, in the order (key, position of the parameter, index).

    Args:
        shards: this rank's part of every parameter, in the same order on all ranks.
        keys: the range of all keys, and the source of the scores of each shard.
        num_live: unpruned elements of every whole parameter.
        ranks: the ranks that have the shards.
        outs: flat masks to write, one per shard, uninitialised, contiguous; None: no masks.
        refuse_nan: whether a live NaN is an error; otherwise NaN rank last.
        most_collected: keys that all ranks together may collect in memory, about; None: any number.
    """

    def __init__(
        self,
        shards: Sequence[Elements],
        keys: tuple[KeyRange, Sequence[ScoreSource]],
        num_live: Sequence[int],
        ranks: Communicator,
        outs: Sequence[Tensor] | None = None,
        *,
        refuse_nan: bool = True,
        most_collected: int | None = None,
    ) -> None:
        self.shards, self.ranks = shards, ranks
        self.outs: Sequence[Tensor] = outs or ()
        self.keys, self.sources = keys
        self.num_live: Array = np.array(num_live)
        self.refuses_nan = refuse_nan and self.keys.is_float
        self.most_collected = math.inf if most_collected is None else most_collected
        self._masks = [shard.flat_mask for shard in shards]
        self._tensors = [s.scores if type(s) is TensorScores else None for s in self.sources]
        self.is_on_host = all(map(memory.takes_numpy, {source.device for source in self.sources}))
        are_safe = False not in [source.is_thread_safe for source in self.sources]
        self._are_safe = self.is_on_host and are_safe
        most = operations_on(self.sources[0].device).CHUNK_BYTES // self.keys.dtype.itemsize
        self._most = max(1, most)
        self._parts = join_small(self._pieces(), self._most)
        self.nan_checked: Array = np.zeros(len(shards), dtype=bool)
        # What the last scan found; and of each shard that it drafted, between which keys.
        self.collected: list[_Collected] = []
        self._drafted: Array = np.zeros((2, len(shards)), dtype=np.int64)
        self._num_below: Array = self._drafted[0]

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
            count_each: count ``Cuts.num_before``, and draft no masks: see [Note: draft].

        Raises:
            ValueError: a live score is NaN, and NaN are refused; names its parameters. On every
                rank.
            RuntimeError: the scores changed between two scans.

        Cost: one scan of the scores (more when a bracket misses, or more keys lie in it than may be
        collected) and about ten all-reduces of up to 32 KiB for each segment; memory for the
        collected keys, about 0.5 % of them at 10**8 elements and less above.
        """
        owners, k = np.asarray(segments), np.asarray(counts)
        totals = sums_of(owners, self.num_live, len(k))
        stored = np.minimum(totals, np.maximum(COLLECT_ALL, totals // 50)).sum()
        if len(k) < 2 or stored <= _STORED:
            return _Search(self, owners, k, totals).cut(count_each, bool(self.outs))
        half = len(k) // 2
        is_first = owners < half  # or in no segment
        first = self.cut(np.where(is_first, owners, -1), k[:half], count_each=count_each)
        last = self.cut(np.where(is_first, -1, owners - half), k[half:], count_each=count_each)
        return Cuts(
            np.where(is_first, first.threshold, last.threshold),
            np.where(is_first, first.index, last.index),
            np.concatenate([first.segments, last.segments]),
            np.where(is_first, first.num_before, last.num_before),
        )

    def write(self, cuts: Cuts) -> list[int]:
        """Write the masks of this rank: zero what lies before the cuts, and no other live element.

        The one place where masks become final. Drafted masks are corrected; others are written.

        Returns:
            Per shard, how many counted live elements were pruned.

        Cost: one pass over the shards without a valid draft; with one, over the collected elements.
        """
        low, high = self._drafted
        is_drafted = (low < cuts.threshold) & (cuts.threshold <= high)
        pruned = np.where(is_drafted, self._num_below, 0)
        corrected, gone = [], []
        for own in self.collected:
            for chunk, keys, positions in zip(own.chunks, own.keys, own.positions, strict=True):
                if chunk.is_single and is_drafted[chunk.shards[0]]:
                    corrected.append(chunk)
                    gone.append(self._correct(chunk, keys, positions, cuts))

        def write(chunk: Chunk, scratch: Scratch) -> Array | Tensor:
            stay = self.kept(chunk, cuts, scratch)
            self.store(chunk, stay)
            operations = operations_on(self.sources[chunk.pieces[0][0]].device)
            number: Array | Tensor = operations.count_pieces(stay, chunk.bounds)
            return number

        others = [
            chunk
            for part in self._parts
            if not (part.is_single and is_drafted[part.shards[0]])
            for chunk in part.cut(self._most)
        ]
        kept = self.visit(others, write)
        for chunk, number in zip(corrected, on_host(gone), strict=True):
            if chunk.is_counted:
                pruned[chunk.shards] += number
        for chunk, number in zip(others, on_host(kept), strict=True):
            if chunk.is_counted:
                pruned[chunk.shards] += chunk.sizes - number
        numbers: list[int] = pruned.tolist()
        return numbers

    def kept(self, chunk: Chunk, cuts: Cuts, scratch: Scratch) -> Flags:
        """Which elements of a chunk stay as they are after the cuts."""
        keys, _, live = self.load(chunk, scratch)
        operations = operations_on(keys.device)
        index = cuts.index[chunk.shards]
        first = spread(cuts.threshold[chunk.shards] + (index >= ALL), chunk.sizes, keys.dtype)
        stay = operations.kept(keys, live, first, scratch)
        for piece in ((index > 0) & (index < ALL)).nonzero()[0]:
            (i, start, _), (begin, end) = chunk.pieces[piece], chunk.bounds[piece : piece + 2]
            ties = operations.positions_of(keys[begin:end], int(cuts.threshold[i]))
            before = self.shards[i].index(ties + start) < int(index[piece])
            gone = memory.select(ties, before) + int(begin)
            if live is not None:
                gone = memory.select(gone, memory.select(torch.as_tensor(live), gone))
            torch.as_tensor(stay)[gone] = False
        return stay

    def _correct(self, chunk: Chunk, keys: Tensor, positions: Tensor, cuts: Cuts) -> Array | Tensor:
        """Zero in a drafted mask what was collected and lies before the cut; how many, [1]."""
        ((i, start, stop),) = chunk.pieces
        threshold, index = int(cuts.threshold[i]), int(cuts.index[i])
        raw: Any = keys.numpy() if memory.takes_numpy(keys.device) else keys
        gone = raw <= threshold if index >= ALL else raw < threshold
        operations = operations_on(keys.device)
        if 0 < index < ALL:
            ties = operations.positions_of(keys, threshold)
            indices = self.shards[i].index(memory.select(positions, ties).long() + start)
            torch.as_tensor(gone)[ties] = indices < index
        number: Array | Tensor = operations.zero(self.outs[i][start:stop], positions, gone)
        return number

    def load(self, chunk: Chunk, scratch: Scratch) -> tuple[Tensor, bool, Flags]:
        """The keys of a chunk, whether they may have NaN, and which elements compete."""
        first = chunk.pieces[0][0]
        if self._tensors[first] is not None:
            scores = chunk.of(self._tensors)
        elif chunk.is_single:
            scores = self.sources[first].load(*chunk.pieces[0][1:], scratch)
        else:  # cloned, because the scratch is used again
            scores = torch.cat(
                [
                    self.sources[i].load(start, stop, scratch).clone()
                    for i, start, stop in chunk.pieces
                ]
            )
        keys, may_have_nan = to_keys(scores, self.keys, scratch)
        if self._masks[first] is None:
            return keys, may_have_nan, None
        return (
            keys,
            may_have_nan,
            operations_on(keys.device).are_live(chunk.of(self._masks), scratch),
        )

    def store(self, chunk: Chunk, stay: Flags) -> None:
        """Write the masks of a chunk: 0 where not ``stay``, elsewhere what they are, or 1."""
        targets = chunk.parts_of(self.outs)
        store = operations_on(targets[0].device).store
        has_masks = self._masks[chunk.pieces[0][0]] is not None
        previous = chunk.of(self._masks) if has_masks else None
        if chunk.is_single:
            store(targets[0], previous, stay)
            return
        joined = torch.as_tensor(stay)
        if has_masks or targets[0].dtype.is_complex:
            joined = targets[0].new_empty(len(joined))
            store(joined, previous, stay)
        torch._foreach_copy_(targets, torch.split(joined, chunk.sizes.tolist()))

    def scan(
        self, members: Array, edges: Array, share: Array, *, drafts: bool, counts_nan: bool
    ) -> Array:
        """Read some shards once: count keys, collect some of them, and draft masks.

        Args:
            members: bool [shards], which of them are read.
            edges: int64 [shards, n]: ascending keys; those between the first two are collected.
            share: [shards], about which fraction of the elements is.
            drafts: whether to write masks: see [Note: draft].
            counts_nan: whether to count NaN.

        Returns:
            int64 [n + 1, shards]: how many live elements that this rank counts have keys up to each
            edge, and how many are NaN.
        """
        above = self.keys.largest_number if counts_nan else None
        chunks = [
            chunk
            for part in self._parts
            if (part.is_counted or (drafts and part.is_single)) and members[part.shards].any()
            for chunk in part.cut(self._most)
        ]

        def scan(chunk: Chunk, scratch: Scratch, *, waits: bool = False) -> tuple[Any, ...]:
            keys, may_have_nan, live = self.load(chunk, scratch)
            columns = [spread(own, chunk.sizes, keys.dtype) for own in edges[chunk.shards].T]
            most = math.inf if waits else 4 * float(share[chunk.pieces[0][0]])
            *found, stay = operations_on(keys.device).scan(
                keys, live, columns, above if may_have_nan else None,
                chunk.bounds, scratch, most,
            )  # fmt: skip
            if drafts and chunk.is_single:
                self.store(chunk, stay)
            return tuple(found)

        calls = [partial(scan, chunk) for chunk in chunks]
        scanned = call_all(calls, self._num_bytes(chunks), are_safe=self._are_safe)
        counts = on_host([own for own, _, _ in scanned])
        totals: Array = np.zeros((edges.shape[1] + 1, len(self.shards)), dtype=np.int64)
        groups: dict[Any, list[tuple[Chunk, Array, Tensor, Tensor]]] = {}
        self._drafted.fill(0)
        for chunk, own, (_, positions, keys) in zip(chunks, counts, scanned, strict=True):
            inside = own[1] - own[0]
            number = int(inside.sum())
            if number > positions.numel():
                _, positions, keys = scan(chunk, Scratch(), waits=True)
            found = chunk, inside, keys[:number], positions[:number]
            groups.setdefault((chunk.is_counted, keys.device), []).append(found)
            if chunk.is_counted:
                np.add.at(totals.T, chunk.shards, own.T)
                if drafts and chunk.is_single:
                    i = chunk.pieces[0][0]
                    self._drafted[:, i] = edges[i, :2]
        self.collected = list(map(_Collected, groups.values()))
        self._num_below = totals[0]
        return totals

    def sample(self, rows: Array, rates: Array, seed: int) -> list[OwnedKeys]:
        """Keys of a part of the elements that this rank counts.

        Args:
            rows: int64 [shards]: the number that the keys of each get; -1: it is not sampled.
            rates: [shards], about which fraction of the elements is taken.
            seed: of the choice.
        """
        generator, scratch, found = np.random.default_rng(seed), Scratch(), []
        for part in self._parts:
            owners, rate = rows[part.shards], rates[part.shards].max()
            size = int(part.bounds[-1])
            length = _RUN if size >= _SMALL else 1
            exact = math.ceil(size * rate) / length
            num_drawn = min(size // length, int(exact) + int(generator.random() < exact % 1))
            if not (part.is_counted and num_drawn and (owners >= 0).any()):
                continue
            # One run per stratum, jittered: regular data cannot hide between them.
            strata = np.arange(num_drawn) + generator.random(num_drawn)
            numbers = (strata * (size // length / num_drawn)).astype(np.int64)
            numbers = np.minimum(numbers, size // length - 1)
            live: Tensor | None
            if part.is_single:
                (i, start, stop), mask = part.pieces[0], self._masks[part.pieces[0][0]]
                runs = Runs(start, stop, length, torch.from_numpy(numbers))
                keys, _ = to_keys(self.sources[i].gather(runs), self.keys, scratch)
                keys, live = keys.clone(), None if mask is None else runs.of(mask) == 1
                own: int | Tensor = int(owners[0])
            else:
                runs = Runs(0, size, length, torch.from_numpy(numbers))
                keys, _, flags = self.load(part, scratch)
                keys = runs.of(keys)
                live = None if flags is None else runs.of(torch.as_tensor(flags))
                positions = runs.positions(torch.device("cpu")).numpy()
                pieces = part.bounds.searchsorted(positions, side="right") - 1
                own = memory.moved(torch.from_numpy(owners[pieces]), keys.device)
                if owners.min() < 0:
                    live = own >= 0 if live is None else live & (own >= 0)
                    own = own.clamp(min=0)
            dead = self.keys.high + 1  # outside of every interval
            found.append((own, keys if live is None else torch.where(live, keys, dead)))
        return found

    def ties_of(self, i: int, key: int, low: int, high: int) -> Iterator[Tensor]:
        """The global indices, between two of them about, of this rank's elements with a key."""
        shard, scratch = self.shards[i], Scratch()
        first, last = 0, self.sources[i].size
        if shard.index.is_ascending:
            first, last = shard.index.positions_of(np.array([low, high + 1])).tolist()
        first, last = max(first, shard.counted.start), min(last, shard.counted.stop)
        for span in spans_of(range(first, last), self._most):
            keys, _, live = self.load(Chunk([(i, span.start, span.stop)], True), scratch)
            at = operations_on(keys.device).positions_of(keys, key)
            if live is not None:
                at = memory.select(at, memory.select(torch.as_tensor(live), at))
            yield shard.index(at + span.start).cpu()

    def visit(self, chunks: Sequence[Chunk], call: Callable[..., R]) -> list[R]:
        """Call a function for each chunk, on several threads where that is safe and worth it."""
        calls = [partial(call, chunk) for chunk in chunks]
        return call_all(calls, self._num_bytes(chunks), are_safe=self._are_safe)

    def _num_bytes(self, chunks: Sequence[Chunk]) -> int:
        return sum([int(chunk.bounds[-1]) for chunk in chunks]) * self.keys.dtype.itemsize

    def _pieces(self) -> Iterator[tuple[Any, tuple[int, int, int], bool, bool]]:
        """What this rank counts of each shard, and the rest, as ``join_small`` takes them."""
        outs = self.outs or self._masks
        several = zip(self.shards, self.sources, self._masks, outs, strict=True)
        for i, (shard, source, mask, out) in enumerate(several):
            counted, size = shard.counted, source.size
            kind = (
                source.device, type(source), source.dtype, mask is None or mask.dtype,
                out is None or out.dtype,
            )  # fmt: skip
            yield kind, (i, counted.start, counted.stop), True, len(counted) == size
            if len(counted) < size:
                yield kind, (i, 0, counted.start), False, False
                yield kind, (i, counted.stop, size), False, False


class _Search:
    """The search for the last key before the cut of some segments, side by side.

    Args:
        segments: int64 [parameters], the segment of each; -1: none.
        k: int64 [segments], how many elements go.
        totals: int64 [segments], live elements.

    The key of each segment lies in [low, high]. Elements of all ranks with smaller keys are
    ``below``, with keys up to high ``upto``; of each parameter, this rank has ``each`` of both.
    Once they are few, the keys in the interval ``are_collected``.
    """

    def __init__(self, ranking: Ranking, segments: Array, k: Array, totals: Array) -> None:
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
        most = np.minimum(np.maximum(COLLECT_ALL, totals // 50), self._ranking.most_collected)
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
            refuse_nan(ranking, num_nan.tolist())
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


def sums_of(segments: Array, numbers: Array, num_segments: int) -> Array:
    """int64 [..., segments]: the sums of numbers, [..., parameters], of their members."""
    # The last sum is that of what is in no segment.
    sums: Array = np.zeros((*numbers.shape[:-1], num_segments + 1), dtype=np.int64)
    np.add.at(sums.T, segments, numbers.T)
    return sums[..., :-1]


def refuse_nan(ranking: Ranking, num_nan: Sequence[int]) -> None:
    """Raise ValueError for the parameters that have NaN among their live elements."""
    where = {
        shard.name: f"{nan} of {live}"
        for shard, live, nan in zip(ranking.shards, ranking.num_live, num_nan, strict=True)
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
