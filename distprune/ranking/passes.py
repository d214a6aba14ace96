"""The passes over the elements of a ranking: load their keys, scan, sample, write masks.

[Note: draft] A scan also writes masks, as if the order were cut where the bracket begins. Once
the cut is known, only the elements that were collected are corrected, a fraction of a percent:

    keys       0 ............ low ....... cut ....... high ............ max
    draft      0 0 0 0 0 0 0 | 1 1 1 1 1 1 1 1 1 1 1 1 | 1 1 1 1 1 1 1 1
    final      0 0 0 0 0 0 0 | 0 0 0 0 0 0 1 1 1 1 1 1 | 1 1 1 1 1 1 1 1
                              collected: visited again

Small shards, many of them in a chunk, are not drafted: they are read again, in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.memory import Array, Scratch
from distprune.base.naming import UnfitScores
from distprune.ranking.chunks import (
    Chunk,
    Elements,
    Flags,
    call_all,
    join_small,
    operations_on,
    spans_of,
    spread,
)
from distprune.ranking.scores import KeyRange, Runs, ScoreSource, select, to_keys
from distprune.ranks.collectives import Communicator

# Neighbours that are sampled together, as a cache line brings them anyway; one by one from
# chunks of fewer elements than the second number.
_RUN, _SMALL = 16, 4096


# An index above all.
ALL = 1 << 62


# The number of the interval that each key belongs to, or all do; keys on one device; and how often
# each occurs, int64; None: once.
OwnedKeys = tuple[int | Tensor, Tensor, Array | None]
# Distinct keys of a shard among the elements that this rank counts, and how often each occurs.
Tally = tuple[Tensor, Array]


@dataclass
class Cuts:
    """Where the order is cut; the same on all ranks. int64 arrays.

    Attributes:
        threshold: of each parameter: elements with a smaller key go, with a larger one stay ...
        index: ... and with this key, those with a smaller global index go.
        num_before: of each parameter, the elements before the cut, if they were asked for.
        common: the same cut of all parameters of one segment: the key of the last element that is
            pruned, how many elements have it, and how many of those are pruned; None of several
            segments, and where nothing is pruned.
    """

    threshold: Array
    index: Array
    num_before: Array
    common: tuple[int, int, int] | None = None


# What a scan collects in a chunk: how many keys of each piece, int64; the keys, [m]; and their
# positions in the chunk, int32 [m].
Found = tuple[Chunk, Array, Tensor, Tensor]


class Collected:
    """The keys that a scan has collected on one device, and that this rank counts.

    Attributes:
        keys: of all chunks, [m].
    """

    def __init__(self, found: Sequence[Found]) -> None:
        self._chunks, counts, keys, self._positions = zip(*found, strict=True)
        self.keys: Tensor = keys[0] if len(keys) == 1 else torch.cat(keys)
        self._shards = np.concatenate([chunk.shards for chunk in self._chunks])
        self._counts = np.concatenate(counts)

    @property
    def shards(self) -> Array:
        """int64 [m]: the number of the shard of each key."""
        return np.repeat(self._shards, self._counts)

    def ties(self, threshold: Array) -> tuple[Array, Array]:
        """The keys that equal the threshold of their shard: its number, and the position in it."""
        wanted = spread(threshold[self._shards], self._counts, self.keys.dtype)
        at = operations_on(self.keys.device).positions_of(self.keys, wanted)
        pieces = self._counts.cumsum().searchsorted(at.cpu().numpy(), side="right")
        starts = np.concatenate([chunk.starts for chunk in self._chunks])
        positions = torch.cat(self._positions)[at].cpu().numpy()
        return self._shards[pieces], positions + starts[pieces]


class Passes:
    """All live elements of some shards, and what is read and written of them.

    Args:
        shards: this rank's part of every parameter, in the same order on all ranks.
        keys: the range of all keys, and the source of the scores of each shard.
        num_live: unpruned elements of every whole parameter.
        ranks: the ranks that have the shards.
        outs: flat masks to write, one per shard, uninitialised, contiguous; None: no masks.
        refuse_nan: whether a live NaN is an error; otherwise NaN rank last.
        most_collected: keys that all ranks together may collect in memory, about; None: any number.
        tallies: of the keys of each shard, which are not read to be cut then; none: they are.

    Attributes:
        are_safe: whether several threads may load keys at a time.
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
        tallies: Sequence[Tally] = (),
    ) -> None:
        self.shards, self.ranks, self.tallies = shards, ranks, tallies
        self.outs: Sequence[Tensor] = outs or ()
        self.keys, self.sources = keys
        self.num_live: Array = np.array(num_live)
        self.refuses_nan = refuse_nan and self.keys.is_float
        self.most_collected = math.inf if most_collected is None else most_collected
        self._masks = [shard.flat_mask for shard in shards]
        self._tensors = [source.tensor for source in self.sources]
        self.is_on_host = all(map(memory.takes_numpy, {source.device for source in self.sources}))
        are_safe = False not in [source.is_thread_safe for source in self.sources]
        self.are_safe = self.is_on_host and are_safe
        most = operations_on(self.sources[0].device).CHUNK_BYTES // self.keys.dtype.itemsize
        self._most = max(1, most)
        self._parts = join_small(self._pieces(), self._most)
        self.nan_checked: Array = np.zeros(len(shards), dtype=bool)
        # What the last scan found; and of each shard that it drafted, between which keys.
        self.found: list[Found] = []
        self._drafted: Array = np.zeros((2, len(shards)), dtype=np.int64)
        self._num_below: Array = self._drafted[0]

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
        for chunk, _, keys, positions in self.found:
            if chunk.is_single and is_drafted[chunk.shards[0]]:
                corrected.append(chunk)
                gone.append(self._correct(chunk, keys, positions, cuts))

        def write(chunk: Chunk, scratch: Scratch) -> Array | Tensor:
            stay = self.kept(chunk, cuts, scratch)
            self.store(chunk, stay)
            operations = operations_on(self.sources[chunk.pieces[0][0]].device)
            return operations.count_pieces(stay, chunk.bounds)

        others = [
            chunk
            for part in self._parts
            if not (part.is_single and is_drafted[part.shards[0]])
            for chunk in part.cut(self._most)
        ]
        written = call_all(write, [(each,) for each in others], self.are_safe)
        numbers = memory.on_host([*gone, *written])
        for position, chunk in enumerate([*corrected, *others]):
            if chunk.is_counted:
                number = numbers[position]
                pruned[chunk.shards] += number if position < len(gone) else chunk.sizes - number
        return list(map(int, pruned))

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
            gone = select(ties, before) + int(begin)
            if live is not None:
                gone = select(gone, select(torch.as_tensor(live), gone))
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
            indices = self.shards[i].index(select(positions, ties).long() + start)
            torch.as_tensor(gone)[ties] = indices < index
        return operations.zero(self.outs[i][start:stop], positions, gone)

    def load(self, chunk: Chunk, scratch: Scratch) -> tuple[Tensor, bool, Flags]:
        """The keys of a chunk, whether they may have NaN, and which elements compete."""
        first = chunk.pieces[0][0]
        if self._tensors[first] is not None:
            scores = chunk.of(self._tensors)
        elif chunk.is_single:
            scores = self.sources[first].load(*chunk.pieces[0][1:], scratch)
        else:  # cloned, because the scratch is used again
            each = [self.sources[i].load(a, b, scratch).clone() for i, a, b in chunk.pieces]
            scores = torch.cat(each)
        keys, may_have_nan = to_keys(scores, self.keys, scratch)
        if self._masks[first] is None:
            return keys, may_have_nan, None
        are_live = operations_on(keys.device).are_live
        return keys, may_have_nan, are_live(chunk.of(self._masks), scratch)

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
        self, members: Array, edges: Array, share: Array, drafts: bool, counts_nan: bool
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

        scanned = call_all(scan, [(chunk,) for chunk in chunks], self.are_safe)
        counts = memory.on_host([own for own, _, _ in scanned])
        totals: Array = np.zeros((edges.shape[1] + 1, len(self.shards)), dtype=np.int64)
        self._drafted.fill(0)
        self.found = []
        for chunk, own, (_, positions, keys) in zip(chunks, counts, scanned, strict=True):
            inside = own[1] - own[0]
            number = int(inside.sum())
            if number > positions.numel():
                _, positions, keys = scan(chunk, Scratch(), waits=True)
            self.found.append((chunk, inside, keys[:number], positions[:number]))
            if chunk.is_counted:
                np.add.at(totals.T, chunk.shards, own.T)
                if drafts and chunk.is_single:
                    i = chunk.pieces[0][0]
                    self._drafted[:, i] = edges[i, :2]
        self._num_below = totals[0]
        return totals

    def collected(self) -> list[Collected]:
        """What the last scan found of the elements that this rank counts, by device."""
        by_device: dict[torch.device, list[Found]] = {}
        for found in self.found:
            if found[0].is_counted:
                by_device.setdefault(found[2].device, []).append(found)
        return list(map(Collected, by_device.values()))

    def sample(self, rows: Array, rates: Array, seed: int) -> list[OwnedKeys]:
        """Keys of a part of the elements that this rank counts.

        Args:
            rows: int64 [shards]: the number that the keys of each get; -1: it is not sampled.
            rates: [shards], about which fraction of the elements is taken.
            seed: of the choice.
        """
        generator, scratch = np.random.default_rng(seed), Scratch()
        found: list[OwnedKeys] = []
        for part in self._parts:
            owners, size = rows[part.shards], len(part)
            length = _RUN if size >= _SMALL else 1
            exact = size * rates[part.shards].max() / length + generator.random()
            num_drawn, num_runs = min(size // length, int(exact)), size // length
            if not (part.is_counted and num_drawn and owners.max() >= 0):
                continue
            # One run per stratum, jittered: regular data cannot hide between them.
            strata = np.arange(num_drawn) + generator.random(num_drawn)
            numbers = (strata * (num_runs / num_drawn)).astype(np.int64).clip(max=num_runs - 1)
            (i, start, stop), mask = part.pieces[0], self._masks[part.pieces[0][0]]
            own: int | Tensor = int(owners[0])
            if part.is_single:
                runs = Runs(start, stop, length, torch.from_numpy(numbers))
                keys = to_keys(self.sources[i].gather(runs), self.keys, scratch)[0].clone()
                live = None if mask is None else runs.of(mask) == 1
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
            found.append((own, keys if live is None else torch.where(live, keys, dead), None))
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
                at = select(at, select(torch.as_tensor(live), at))
            yield shard.index(at + span.start).cpu()

    def raise_nan(self, num_nan: Sequence[int]) -> None:
        """Raise ValueError for the parameters that have NaN among their live elements, if any."""
        several = zip(self.shards, self.num_live, num_nan, strict=True)
        where = {shard.name: f"{nan} of {live}" for shard, live, nan in several if nan}
        if where:
            parameters = ", ".join(f"{name} ({count})" for name, count in where.items())
            raise UnfitScores(
                f"the scores of {parameters} are NaN; expected numbers for every unpruned "
                "element. NaN has no place in a ranking: repair the weights, or mask them first "
                "with custom_from_mask.",
                "nan",
                where,
            )

    def _pieces(self) -> Iterator[tuple[Any, tuple[int, int, int], bool, bool]]:
        """What this rank counts of each shard, and the rest, as ``join_small`` takes them."""
        outs = self.outs or self._masks
        several = zip(self.shards, self.sources, self._masks, outs, strict=True)
        for i, (shard, source, mask, out) in enumerate(several):
            counted, size = shard.counted, source.size
            is_whole = counted.stop - counted.start == size
            kind = (
                source.device, type(source), source.dtype, mask is None or mask.dtype,
                out is None or out.dtype,
            )  # fmt: skip
            yield kind, (i, counted.start, counted.stop), True, is_whole
            if not is_whole:
                yield kind, (i, 0, counted.start), False, False
                yield kind, (i, counted.stop, size), False, False
