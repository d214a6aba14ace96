"""Pruning in blocks: rows, and N:M along the inputs, of parameters on any sharding.

Each block (see ``base/blocks.py``) loses its lowest elements by itself, in the order (key,
row-major index). It has a number, and its elements have places in it::

    a [4, 6] weight, blocks of 3 inputs     columns 0 to 3 of it, on one rank of two
      0 0 0 | 1 1 1                           0 0 0 | 1
      2 2 2 | 3 3 3                           2 2 2 | 3       blocks 0, 2, 4 and 6 are whole here,
      4 4 4 | 5 5 5                           4 4 4 | 5       and 1, 3, 5 and 7 are cut
      6 6 6 | 7 7 7                           6 6 6 | 7

Runs of memory that are whole blocks, one band after the other, are ranked there. Of all other
blocks, the keys of many lie one after the other in a batch. Each rank writes those that it counts,
between zeros; the sum over the ranks is the batch, and every rank ranks all blocks of it and writes
the masks of its own elements::

    rank 0    7 3 1 5 0 0 0 0   2 8 4 4 0 0 0 0
    rank 1    0 0 0 0 6 2 9 1   0 0 0 0 5 3 7 1
    sum       7 3 1 5 6 2 9 1   2 8 4 4 5 3 7 1       two blocks of eight elements

Keys of 16 and 32 bits share words of 64 bits, so an element takes as many bytes as its key. No rank
gathers a parameter.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.blocks import BlockRule, Blocks, layout_along
from distprune.base.memory import Array, Scratch
from distprune.ranking.chunks import Chunk, Flags, operations_on, per_shard, spans_of
from distprune.ranking.lowest import lowest_of, lowest_on_device, replace_dead
from distprune.ranking.ranking import Ranking, refuse_nan
from distprune.ranks.collectives import Communicator
from distprune.shards.geometry import IndexMap

# Larger bands are not ranked in memory.
_MAX_BAND = 1 << 22
# Positions whose pieces are in memory at a time.
_CHUNK = 1 << 18
# Elements of a batch; a batch has at least one block.
_MOST = 1 << 20


@dataclass(frozen=True)
class BlockedParameter:
    """The blocks of one whole parameter; the same on all ranks.

    Attributes:
        blocks: of the whole parameter.
        rule: that made them.
        shape: of the whole parameter.
        dims: that an output sums over, as for ``layout_along``; () if unknown, which is slower.
    """

    blocks: Blocks
    rule: BlockRule
    shape: tuple[int, ...]
    dims: tuple[int, ...]


@dataclass(frozen=True)
class _Places:
    """Where the blocks of a parameter lie in a local part.

    Attributes:
        local: blocks of the elements in ``bands``, which lie there one after the other.
        bands: flat positions of whole bands of whole blocks.
        rest: ranges of all other flat positions.
        cut: numbers of blocks of which some elements are here, and some are not; ascending.
        whole: numbers of blocks in ``rest`` that are whole all the same; ascending.
    """

    local: Blocks
    bands: range
    rest: tuple[range, ...]
    cut: Array
    whole: Array


class _Batch(NamedTuple):
    """Blocks of one parameter that are ranked at a time.

    Attributes:
        position: of the parameter.
        blocks: of the whole parameter.
        numbers: int64, of the blocks, ascending.
        first: how many elements of the batch come before them.
    """

    position: int
    blocks: Blocks
    numbers: Array
    first: int = 0


_NONE: Array = np.zeros(0, dtype=np.int64)
_NOWHERE = _Places(Blocks(1, 1, 1, 0), range(0), (), _NONE, _NONE)


def prune_in_blocks(ranking: Ranking, parameters: Sequence[BlockedParameter | None]) -> list[int]:
    """Write the masks of this rank. Collective.

    Args:
        ranking: what is pruned, with masks to write.
        parameters: the blocks; None where this rank has no element and does not know them.

    Returns:
        Per parameter, how many elements that this rank counts were pruned now.

    Raises:
        ValueError: a live score is NaN, which names its parameters; ranks have different blocks.
            On every rank.

    Cost: where blocks are whole, one read of the scores, two of the masks and memory for a chunk.
    For blocks that the sharding cuts, another read, an all-reduce of their keys, and memory for
    about 40 bytes for each element of a batch; every rank ranks them all. Two small all-reduces,
    and the texts of :meth:`~distprune.ranks.collectives.Communicator.distinct_texts` that say which
    blocks are cut: about 20 bytes for each regular layout of a parameter, else for every few
    blocks.
    """
    own = _Blocked(ranking, parameters)
    num_nan = ranking.ranks.reduce(len(parameters), own.write_whole).tolist()
    refuse_nan(ranking, num_nan)
    if several := own.agree_on_cut():
        own.prune_cut(several, ranking.ranks)
    return own.num_pruned


class _Blocked:
    """This rank's part of :func:`prune_in_blocks`, whose arguments it has."""

    def __init__(self, ranking: Ranking, parameters: Sequence[BlockedParameter | None]) -> None:
        self._ranking, self._parameters, self._outs = ranking, parameters, ranking.outs
        self._places: list[_Places] = []
        bits = 8 * ranking.keys.dtype.itemsize
        self._unsigned = np.dtype(f"u{bits // 8}")
        # The key of what is pruned already, as an unsigned integer of the same bits.
        self._lowest = self._unsigned.type((ranking.keys.low - 1) % (1 << bits))

    def write_whole(self) -> Tensor:
        """Write what this rank can decide; per parameter, how many live elements are NaN."""
        ranking = self._ranking
        chunks = []
        for i, parameter in enumerate(self._parameters):
            own = _NOWHERE if parameter is None else self._find_blocks(i, parameter)
            self._places.append(own)
            band, source = own.local.band, ranking.sources[i]
            # To rank some takes twice the memory of a pass.
            most = operations_on(source.device).CHUNK_BYTES // source.dtype.itemsize // 2
            for span in spans_of(range(len(own.bands) // band), max(1, most // band)):
                first = own.bands.start + span.start * band
                chunks.append(Chunk([(i, first, first + len(span) * band)], True))
            for span in _spans(own.rest):
                chunks.append(Chunk([(i, span.start, span.stop)], False))
        found = ranking.visit(chunks, self._write_chunk)
        self.num_pruned: list[int]
        self.num_pruned, num_nan = (
            per_shard(chunks, counts, len(self._parameters)).tolist()
            for counts in ([pruned for pruned, _ in found], [nan for _, nan in found])
        )
        alone = [
            _Batch(i, parameter.blocks, own.whole)
            for i, (parameter, own) in enumerate(zip(self._parameters, self._places, strict=True))
            if parameter is not None and len(own.whole)
        ]
        self.prune_cut(alone, Communicator(()))
        return torch.tensor(num_nan, dtype=torch.int64)

    def _write_chunk(self, chunk: Chunk, scratch: Scratch) -> tuple[Array | Tensor, Array | Tensor]:
        """Write the mask of whole bands, or the mask in force; counts of pruned ones and NaN."""
        ((i, start, stop),), keys = chunk.pieces, self._ranking.keys
        loaded, may_have_nan, live = self._ranking.load(chunk, scratch)
        operations = operations_on(loaded.device)
        counted = self._ranking.shards[i].counted
        here = slice(max(counted.start - start, 0), max(min(counted.stop, stop) - start, 0))
        bounds = np.array([0, max(here.stop - here.start, 0)])
        raw: Any = loaded.numpy() if memory.takes_numpy(loaded.device) else loaded
        none = num_nan = np.zeros(1, dtype=np.int64)
        if may_have_nan:
            flags = raw[here] > keys.largest_number
            num_nan = operations.count_pieces(flags if live is None else flags & live[here], bounds)
        if not chunk.is_counted:
            self._ranking.store(chunk, raw == raw)  # as it is; 1 without a mask
            return none, num_nan
        blocks = self._places[i].local
        lowest: Flags
        if isinstance(raw, Tensor):
            lowest = lowest_on_device(
                blocks, raw if live is None else raw.where(live, keys.low - 1)
            )
        else:
            if live is not None:
                replace_dead(raw, live, keys.low - 1, scratch)
            lowest = lowest_of(blocks, raw, scratch)
        if live is not None:
            lowest &= live
        num_pruned = operations.count_pieces(lowest[here], bounds)
        self._ranking.store(chunk, ~lowest)
        return num_pruned, num_nan

    def agree_on_cut(self) -> list[_Batch]:
        """The blocks that are cut, of each parameter that has some. Collective."""

        def describe() -> str:
            cut = {}
            for i, (own, parameter) in enumerate(zip(self._places, self._parameters, strict=True)):
                if len(own.cut) and parameter is not None:
                    cut[i] = [parameter.blocks, progressions(own.cut)]
            return json.dumps(cut)

        ranks = self._ranking.ranks
        texts, _ = ranks.distinct_texts(ranks.run(describe))
        blocks: dict[int, Blocks] = {}
        found: dict[int, list[Array]] = {}
        for text in texts:
            for key, (fields, several) in json.loads(text).items():
                own = blocks.setdefault(int(key), Blocks(*fields))
                if own != Blocks(*fields):
                    raise ValueError(
                        f"{self._ranking.shards[int(key)].name}: ranks would prune it in different "
                        f"blocks ({own}; and {Blocks(*fields)}). Expected modules of the same "
                        "kind, and the same arguments, on every rank."
                    )
                found.setdefault(int(key), [])
                found[int(key)] += [first + step * np.arange(n) for first, step, n in several]
        return [_Batch(i, blocks[i], np.unique(np.concatenate(found[i]))) for i in sorted(found)]

    def prune_cut(self, several: Sequence[_Batch], ranks: Communicator) -> None:
        """Zero the lowest elements of blocks that are not in bands. Collective over ``ranks``.

        A batch is written while the next one is collected: one all-reduce each.
        """
        done: tuple[list[_Batch], Tensor] | None = None
        for batch in _batches(several):
            size = batch[-1].first + len(batch[-1].numbers) * batch[-1].blocks.size
            num_words = -(-size * self._unsigned.itemsize // 8)

            def send(
                batch: list[_Batch] = batch,
                num_words: int = num_words,
                done: tuple[list[_Batch], Tensor] | None = done,
            ) -> Tensor:
                if done is not None:
                    self._write(*done)
                words = torch.zeros(num_words, dtype=torch.int64)
                self._collect(batch, words.numpy().view(self._unsigned), is_alone=ranks.size == 1)
                return words

            done = batch, ranks.reduce(num_words, send)
        if done is not None:
            ranks.run(lambda last=done: self._write(*last))  # type: ignore[misc]

    def _collect(self, batch: Sequence[_Batch], numbers: Array, *, is_alone: bool) -> None:
        """Write the keys that this rank counts at their places, relative to the lowest key."""
        ranking, scratch = self._ranking, Scratch()
        for i, span, are_inside, targets in self._find(batch):
            loaded, _, live = ranking.load(Chunk([(i, span.start, span.stop)], True), scratch)
            if live is not None:
                loaded = torch.where(torch.as_tensor(live), loaded, ranking.keys.low - 1)
            positions = np.arange(span.start, span.stop)
            counted = ranking.shards[i].counted
            sent = are_inside & (positions >= counted.start) & (positions < counted.stop)
            if is_alone:  # then replicas are not told apart
                sent = are_inside
            relative = loaded.cpu().numpy()[sent].view(self._unsigned)
            numbers[targets[sent[are_inside]]] = relative - self._lowest

    def _write(self, batch: Sequence[_Batch], words: Tensor) -> None:
        """Rank the blocks of a batch, zero their lowest elements, and count these."""
        numbers = words.numpy().view(self._unsigned) + self._lowest
        signed = numbers.view(f"i{numbers.itemsize}")
        lowest = np.zeros(len(signed), dtype=bool)
        for one in batch:
            here = slice(one.first, one.first + len(one.numbers) * one.blocks.size)
            in_rows = Blocks(one.blocks.size, 1, 1, one.blocks.num_pruned)
            lowest[here] = lowest_of(in_rows, signed[here])
        for i, span, are_inside, targets in self._find(batch):
            shard, out = self._ranking.shards[i], self._outs[i][span.start : span.stop]
            zeroed = np.zeros(len(span), dtype=bool)
            zeroed[are_inside] = lowest[targets]
            if shard.flat_mask is not None:
                zeroed &= (shard.flat_mask[span.start : span.stop] == 1).cpu().numpy()
            gone = np.flatnonzero(zeroed)
            first, last = np.searchsorted(
                gone + span.start, [shard.counted.start, shard.counted.stop]
            )
            self.num_pruned[i] += int(last - first)
            out[torch.from_numpy(gone).to(out.device)] = 0

    def _find(self, batch: Sequence[_Batch]) -> Iterator[tuple[int, range, Array, Array]]:
        """The elements of a batch that this rank has, span by span.

        Yields:
            The parameter, the span, which of its positions belong to the batch (bool), and where
            these are in the batch (int64).
        """
        for i, blocks, numbers, first in batch:
            index = self._ranking.shards[i].index
            bands = [int(numbers[0]) // blocks.columns, int(numbers[-1]) // blocks.columns + 1]
            start, stop = 0, self._ranking.sources[i].size
            if index.is_ascending:
                start, stop = index.positions_of(np.array(bands) * blocks.band).tolist()
            ranges = [
                range(max(each.start, start), min(each.stop, stop)) for each in self._places[i].rest
            ]
            for span in _spans(ranges):
                of_block, places = self._places_in(i, blocks, span)
                slots = np.minimum(np.searchsorted(numbers, of_block), len(numbers) - 1)
                are_inside = numbers[slots] == of_block
                if are_inside.any():
                    targets = first + slots * blocks.size + places
                    yield i, span, are_inside, targets[are_inside]

    def _places_in(self, i: int, blocks: Blocks, span: range) -> tuple[Array, Array]:
        """The number of the block and the place in it, of each element of a span."""
        positions = torch.arange(span.start, span.stop)
        indices = self._ranking.shards[i].index(positions).numpy()
        bands, inside = np.divmod(indices, blocks.band)
        if blocks.columns == 1:
            return bands, inside
        steps, inside = np.divmod(inside, blocks.stride)
        columns, inside = np.divmod(inside, blocks.kernel)
        return bands * blocks.columns + columns, steps * blocks.kernel + inside

    def _find_blocks(self, i: int, parameter: BlockedParameter) -> _Places:
        """Find the blocks of a shard. Local; reads no element.

        Cost: nothing where the shard is a sequence of whole blocks; otherwise some passes over the
        indices of the other elements, and 8 bytes for each block of the parameter.
        """
        shard, size, blocks = (
            self._ranking.shards[i],
            self._ranking.sources[i].size,
            parameter.blocks,
        )
        if not size:
            return _NOWHERE
        if not blocks.num_pruned:
            return _Places(_NOWHERE.local, range(0), (range(size),), _NONE, _NONE)
        local = _blocks_of_box(shard.index, size, parameter)
        if local is not None and local.band <= _MAX_BAND:
            return _Places(local, range(size), (), _NONE, _NONE)
        bands, rest = range(0), [range(size)]
        if shard.index.start is not None and blocks.band <= _MAX_BAND:
            first = min(-shard.index.start % blocks.band, size)
            last = first + (size - first) // blocks.band * blocks.band
            bands = range(first, last)
            rest = [r for r in (range(first), range(last, size)) if r]
        numbers = np.zeros(shard.numel // blocks.size if rest else 0, dtype=np.int64)
        for span in _spans(rest):
            of_block, _ = self._places_in(i, blocks, span)
            first = int(of_block.min())
            counts = np.bincount(of_block - first)
            numbers[first : first + len(counts)] += counts
        cut = np.flatnonzero((numbers > 0) & (numbers < blocks.size))
        return _Places(blocks, bands, tuple(rest), cut, np.flatnonzero(numbers == blocks.size))


def _blocks_of_box(index: IndexMap, size: int, parameter: BlockedParameter) -> Blocks | None:
    """The blocks of a part that is a box in the parameter, if none of them is cut; else None."""
    shape, dims = parameter.shape, parameter.dims
    sizes = [len(rows) for rows in index.coordinates]
    if (
        not dims
        or index.offset
        or index.dims != tuple(range(len(shape)))
        or math.prod(sizes) != size
    ):
        return None
    rule, along = parameter.rule, index.coordinates[dims[0]]
    if rule.kept_of is not None:
        m = rule.kept_of[1]
        if along.start % m or len(along) % m:
            return None
    elif any(sizes[dim] != shape[dim] for dim in dims):
        return None
    return rule.blocks(size, layout_along("", sizes, dims), parameter.blocks.num_pruned)


def _spans(ranges: Sequence[range]) -> Iterator[range]:
    """Chunks of ranges of positions."""
    for positions in ranges:
        for start in range(positions.start, positions.stop, _CHUNK):
            yield range(start, min(start + _CHUNK, positions.stop))


def _batches(several: Sequence[_Batch]) -> Iterator[list[_Batch]]:
    """Cut blocks into batches of about equal size."""
    batch: list[_Batch] = []
    size = 0
    for one in several:
        start = 0
        while start < len(one.numbers):
            if batch and size + one.blocks.size > _MOST:
                yield batch
                batch, size = [], 0
            stop = start + max(1, (_MOST - size) // one.blocks.size)
            batch.append(one._replace(numbers=one.numbers[start:stop], first=size))
            size += len(batch[-1].numbers) * one.blocks.size
            start = stop
    if batch:
        yield batch


def progressions(numbers: Array) -> list[tuple[int, int, int]]:
    """Ascending numbers as few arithmetic progressions, (first, step, how many) of each."""
    steps = np.diff(numbers)
    # Runs of equal steps. A number that ends one progression does not begin another.
    edges = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
    found: list[tuple[int, int, int]] = []
    next_free = 0
    for first, last in itertools.pairwise(edges):
        # Steps [first, last) join numbers [first, last].
        start = max(first, next_free)
        if last > start:
            found.append((int(numbers[start]), int(steps[first]), last - start + 1))
            next_free = last + 1
    return found + [(int(number), 1, 1) for number in numbers[next_free:]]
