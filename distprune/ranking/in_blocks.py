"""Pruning in blocks: rows, and N:M along the inputs, of parameters on any sharding.

Each block (see ``base/blocks.py``) loses its lowest elements by itself, in the order (key,
row-major index). Bands of blocks follow each other in the parameter::

    a [4, 6] weight, blocks of 3 inputs     columns 0 to 3 of it, on one rank of two
      0 0 0 | 1 1 1                           0 0 0 | 1
      2 2 2 | 3 3 3                           2 2 2 | 3       all bands are exchanged, because
      4 4 4 | 5 5 5                           4 4 4 | 5       blocks 1, 3, 5 and 7 are cut
      6 6 6 | 7 7 7                           6 6 6 | 7

A part that is a box of whole blocks, or a run of memory, is ranked where it is, but for the bands
at the ends of a run that are cut. Of all other bands, the keys of many lie one after the other in a
batch, as they do in the parameter. Each rank writes those that it counts, between zeros; the sum
over the ranks is the batch, and every rank ranks all blocks of it and writes the masks of its own
elements::

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
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.blocks import BlockRule, Blocks, layout_along
from distprune.base.memory import Array, Scratch
from distprune.ranking.chunks import Chunk, Flags, call_all, operations_on, per_shard, spans_of
from distprune.ranking.ranking import Ranking
from distprune.shards.geometry import IndexMap

# Larger bands are not ranked where they are.
_MAX_BAND = 1 << 24
# Positions whose pieces are in memory at a time.
_CHUNK = 1 << 18
# Elements of a batch; a batch has at least one block.
_MOST = 1 << 20


@dataclass(frozen=True)
class BlockedParameter:
    """The blocks of one whole parameter; the same on all ranks that know its module.

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


# How a local part of a parameter is ranked: flat positions of whole bands, which are ranked here;
# the blocks of these elements, which lie there one after the other; ranges of all other flat
# positions; and the numbers of the bands that are exchanged, None for all of the parameter.
_Part = tuple[range, Blocks, tuple[range, ...], list[int] | None]


# Some blocks of one parameter that are exchanged at a time: the parameter; its blocks; the numbers
# of all its bands that are exchanged, int64, ascending; the numbers of the blocks that are meant,
# counted through these bands.
_Batch = tuple[int, Blocks, Array, range]


def prune_in_blocks(ranking: Ranking, parameters: Sequence[BlockedParameter]) -> list[int]:
    """Write the masks of this rank. Collective.

    Args:
        ranking: what is pruned, with masks to write.
        parameters: the blocks; of none where this rank has no element and does not know them.

    Returns:
        Per parameter, how many elements that this rank counts were pruned now.

    Raises:
        ValueError: a live score is NaN, which names its parameters; ranks have different blocks.
            On every rank.

    Cost: where blocks are whole, one read of the scores, two of the masks and memory for a chunk.
    For bands that are exchanged, another read, an all-reduce of their keys, and memory for about 40
    bytes for each element of a batch; every rank ranks them all. Two small all-reduces, and the
    texts of :meth:`~distprune.ranks.collectives.Communicator.distinct_texts` that say which bands
    are cut.
    """
    ranks = ranking.ranks
    own = ranks.run(lambda: _Blocked(ranking, parameters))
    cut = own.agree(ranks.distinct_texts(ranks.run(own.describe_cut))[0])
    ranking.raise_nan(ranks.reduce(len(parameters), own.write_whole).tolist())
    for batches in _several(cut, ranking):
        words = ranks.reduce(own.num_words(batches), partial(own.exchange, batches))
        own.summed = batches, words  # written while the next ones are collected
    if cut:
        ranks.run(own.write_summed)
    return list(map(int, own.num_pruned))


class _Blocked:
    """This rank's part of :func:`prune_in_blocks`, whose arguments it has."""

    def __init__(self, ranking: Ranking, parameters: Sequence[BlockedParameter]) -> None:
        self._ranking = ranking
        several = zip(parameters, ranking.shards, ranking.sources, strict=True)
        self._parts = [_part(own, shard.index, source.size) for own, shard, source in several]
        self._whole = [own.blocks for own in parameters]
        self.num_pruned: Array = np.zeros(len(parameters), dtype=np.int64)
        self.summed: tuple[list[_Batch], Tensor] = [], torch.zeros(0, dtype=torch.int64)
        bits = 8 * ranking.keys.dtype.itemsize
        self._unsigned = np.dtype(f"u{bits // 8}")
        # The key of what is pruned already, as an unsigned integer of the same bits.
        self._lowest = self._unsigned.type((ranking.keys.low - 1) % (1 << bits))

    def describe_cut(self) -> str:
        """The bands that have to be exchanged, because this rank has a part of their blocks."""
        parts = enumerate(self._parts)
        return json.dumps({i: [self._whole[i], cut] for i, (*_, cut) in parts if cut != []})

    def agree(self, texts: Sequence[str]) -> dict[int, tuple[Blocks, list[int] | None]]:
        """What is exchanged of each parameter, from the texts of all ranks."""
        found: dict[int, tuple[Blocks, list[int] | None]] = {}
        for text in texts:
            for key, (fields, cut) in json.loads(text).items():
                i, blocks = int(key), Blocks(*fields)
                known, bands = found.setdefault(i, (blocks, []))
                if known != blocks:
                    raise ValueError(
                        f"{self._ranking.shards[i].name}: ranks would prune it in different "
                        f"blocks ({known}; and {blocks}). Expected modules of the same "
                        "kind, and the same arguments, on every rank."
                    )
                both = None if bands is None or cut is None else sorted({*bands, *cut})
                found[i] = blocks, both
        for i, (blocks, bands) in found.items():
            if bands is None:
                everything = (range(self._ranking.sources[i].size),)
                self._parts[i] = range(0), blocks, everything, None
        return found

    def write_whole(self) -> Tensor:
        """Write what this rank decides alone; per parameter, how many live elements are NaN."""
        chunks = []
        for i, (bands, blocks, rest, _) in enumerate(self._parts):
            band, source = blocks.band, self._ranking.sources[i]
            # To rank some takes twice the memory of a pass.
            most = operations_on(source.device).CHUNK_BYTES // source.dtype.itemsize // 2
            for span in spans_of(range(len(bands) // band), max(1, most // band)):
                first = bands.start + span.start * band
                chunks.append(Chunk([(i, first, first + len(span) * band)], True))
            for positions in rest:
                chunks += Chunk([(i, positions.start, positions.stop)], False).cut(_CHUNK)
        items = [(chunk,) for chunk in chunks]
        counts = call_all(self._write_chunk, items, self._ranking.are_safe)
        self.num_pruned += per_shard(chunks, [pruned for pruned, _ in counts], len(self._parts))
        return torch.from_numpy(per_shard(chunks, [nan for _, nan in counts], len(self._parts)))

    def _write_chunk(self, chunk: Chunk, scratch: Scratch) -> tuple[Array | Tensor, Array | Tensor]:
        """Write the mask of whole bands, or the mask in force; counts of pruned ones and NaN."""
        ((i, start, _),), ranking = chunk.pieces, self._ranking
        loaded, may_have_nan, live = ranking.load(chunk, scratch)
        raw: Any = loaded.numpy() if memory.takes_numpy(loaded.device) else loaded
        count = operations_on(loaded.device).count_pieces
        counted = ranking.shards[i].counted
        here = slice(max(counted.start - start, 0), max(counted.stop - start, 0))
        num_pruned = num_nan = np.zeros(1, dtype=np.int64)
        if may_have_nan:
            flags = raw[here] > ranking.keys.largest_number
            num_nan = count(flags if live is None else flags & live[here], chunk.bounds)
        if not chunk.is_counted:
            ranking.store(chunk, raw == raw)  # as it is; 1 without a mask
            return num_pruned, num_nan
        if live is not None:
            select = torch.where if isinstance(raw, Tensor) else np.where
            raw = select(live, raw, ranking.keys.low - 1)
        lowest = lowest_of(self._parts[i][1], raw, scratch)
        if live is not None:
            lowest &= live
        ranking.store(chunk, ~lowest)
        return count(lowest[here], chunk.bounds), num_nan

    def num_words(self, batches: Sequence[_Batch]) -> int:
        """Words of 64 bits that the keys of some batches take."""
        return -(-_num_elements(batches) * self._unsigned.itemsize // 8)

    def exchange(self, batches: Sequence[_Batch]) -> Tensor:
        """Write what was summed, and collect the next keys, relative to the lowest key: a step."""
        self.write_summed()
        words = torch.zeros(self.num_words(batches), dtype=torch.int64)
        numbers, scratch = words.numpy().view(self._unsigned), Scratch()
        for i, span, are_inside, targets in self._find(batches):
            loaded, _, live = self._ranking.load(Chunk([(i, span.start, span.stop)], True), scratch)
            if live is not None:
                loaded = torch.where(torch.as_tensor(live), loaded, self._ranking.keys.low - 1)
            positions, counted = np.arange(span.start, span.stop), self._ranking.shards[i].counted
            sent = are_inside & (positions >= counted.start) & (positions < counted.stop)
            relative = loaded.cpu().numpy()[sent].view(self._unsigned)
            numbers[targets[sent[are_inside]]] = relative - self._lowest
        return words

    def write_summed(self) -> None:
        """Rank the blocks that were summed last, zero their lowest elements, and count these."""
        batches, words = self.summed
        numbers = words.numpy().view(self._unsigned) + self._lowest
        signed, end = numbers.view(f"i{numbers.itemsize}"), 0
        lowest: Array = np.zeros(len(signed), dtype=bool)
        for _, blocks, _, span in batches:
            here, end = slice(end, end + len(span) * blocks.size), end + len(span) * blocks.size
            alone = Blocks(blocks.size, 1, 1, blocks.num_pruned)
            lowest[here] = lowest_of(alone, signed[here])
        for i, span, are_inside, targets in self._find(batches):
            shard, out = self._ranking.shards[i], self._ranking.outs[i][span.start : span.stop]
            zeroed: Array = np.zeros(len(span), dtype=bool)
            zeroed[are_inside] = lowest[targets]
            if shard.flat_mask is not None:
                zeroed &= (shard.flat_mask[span.start : span.stop] == 1).cpu().numpy()
            gone = np.flatnonzero(zeroed)
            ends = [shard.counted.start, shard.counted.stop]
            first, last = np.searchsorted(gone + span.start, ends)
            self.num_pruned[i] += last - first
            out[torch.from_numpy(gone).to(out.device)] = 0

    def _find(self, batches: Sequence[_Batch]) -> Iterator[tuple[int, range, Array, Array]]:
        """The elements of some batches that this rank has, span by span.

        Yields:
            The parameter, the span, which of its positions belong to a batch (bool), and where
            these are in the batches (int64).
        """
        begin = 0
        for i, blocks, bands, numbers in batches:
            first, last = numbers[0], numbers[-1]
            index = self._ranking.shards[i].index
            start, stop = 0, self._ranking.sources[i].size
            if index.is_ascending:
                ends = bands[[first // blocks.columns, last // blocks.columns]] + [0, 1]
                start, stop = index.positions_of(ends * blocks.band).tolist()
            for rest in self._parts[i][2]:
                here = range(max(rest.start, start), min(rest.stop, stop))
                for span in spans_of(here, _CHUNK):
                    indices = index(torch.arange(span.start, span.stop)).numpy()
                    band, inside = np.divmod(indices, blocks.band)
                    step, inside = np.divmod(inside, blocks.stride)
                    column, inside = np.divmod(inside, blocks.kernel)
                    slot = np.minimum(bands.searchsorted(band), len(bands) - 1)
                    number = slot * blocks.columns + column
                    are_inside = (bands[slot] == band) & (number >= first) & (number <= last)
                    if are_inside.any():
                        place = (number - first) * blocks.size + step * blocks.kernel + inside
                        yield i, span, are_inside, begin + place[are_inside]
            begin += len(numbers) * blocks.size


def _part(parameter: BlockedParameter, index: IndexMap, size: int) -> _Part:
    """How a shard of so many elements is ranked. Local; reads no element."""
    blocks, everything = parameter.blocks, (range(size),)
    if not size or not blocks.num_pruned:
        return range(0), blocks, everything, []
    local = _blocks_of_box(index, size, parameter)
    if local is not None and local.band <= _MAX_BAND:
        return range(size), local, (), []
    if index.start is None or blocks.band > _MAX_BAND:
        return range(0), blocks, everything, None
    first = min(-index.start % blocks.band, size)
    last = first + (size - first) // blocks.band * blocks.band
    ends = range(first), range(last, size)
    cut = sorted(
        {(index.start + positions.start) // blocks.band for positions in ends if positions}
    )
    return range(first, last), blocks, ends, cut


def _several(
    cut: dict[int, tuple[Blocks, list[int] | None]], ranking: Ranking
) -> Iterator[list[_Batch]]:
    """What is exchanged, in batches that together have about as many elements as fit."""
    several: list[_Batch] = []
    for i, (blocks, numbers) in sorted(cut.items()):
        num_bands = ranking.shards[i].numel // blocks.band
        bands = np.arange(num_bands) if numbers is None else np.array(numbers)
        for span in spans_of(range(len(bands) * blocks.columns), _MOST // blocks.size):
            batch = i, blocks, bands, span
            if several and _num_elements([*several, batch]) > _MOST:
                yield several
                several = []
            several.append(batch)
    if several:
        yield several


def _num_elements(batches: Sequence[_Batch]) -> int:
    return sum(len(numbers) * blocks.size for _, blocks, _, numbers in batches)


def _blocks_of_box(index: IndexMap, size: int, parameter: BlockedParameter) -> Blocks | None:
    """The blocks of a part that is a box in the parameter, if none of them is cut; else None."""
    shape, dims, rule = parameter.shape, parameter.dims, parameter.rule
    sizes = [len(rows) for rows in index.coordinates]
    is_box = not index.offset and index.dims == (*range(len(shape)),) and math.prod(sizes) == size
    if not (dims and is_box):
        return None
    if rule.kept_of is None:
        are_whole = all(sizes[dim] == shape[dim] for dim in dims)
    else:
        along = index.coordinates[dims[0]]
        are_whole = not (along.start % rule.kept_of[1] or len(along) % rule.kept_of[1])
    return rule.blocks(size, layout_along("", sizes, dims)) if are_whole else None


# Elements that are ranked at a time if rows are interleaved, because ranking copies them.
_STRIPE = 1 << 19
# Longer blocks are partitioned: comparing all pairs would take more time.
_FEW = 16


def lowest_of(blocks: Blocks, keys: Any, scratch: Scratch | None = None) -> Flags:
    """Which elements of blocks are pruned.

    Args:
        blocks: of one tensor.
        keys: 1-d, of whole bands: an array on a CPU, a tensor on other devices.
        scratch: memory to use again; the result lies in it, until the next call.

    Returns:
        bool, like keys.

    Cost: scratch memory of about 10 bytes per element; 2 bytes for blocks of few elements.
    """
    if isinstance(keys, Tensor):
        return _lowest_on_device(blocks, keys)
    scratch = scratch or Scratch()
    lowest = scratch.array("lowest", keys.size, bool)
    if blocks.num_pruned in (0, blocks.size):
        lowest.fill(blocks.num_pruned > 0)
    elif blocks.kernel == 1 and blocks.size <= _FEW:
        _lowest_of_few(keys, blocks, lowest, scratch)
    elif blocks.columns == 1:
        rows = (-1, blocks.size)
        _lowest_in_rows(keys.reshape(rows), blocks.num_pruned, lowest.reshape(rows), scratch)
    else:
        _lowest_in_columns(keys, blocks, lowest, scratch)
    return lowest


def _lowest_in_columns(keys: Array, blocks: Blocks, lowest: Array, scratch: Scratch) -> None:
    """:func:`_lowest_in_rows` of rows that are interleaved: they are copied apart, and back."""
    shape = (-1, blocks.length, blocks.columns, blocks.kernel)
    bands, lowest = keys.reshape(shape), lowest.reshape(shape)
    num_bands = max(_STRIPE // blocks.band, 1)
    num_columns = max(_STRIPE // blocks.size, 1)
    for first in range(0, len(bands), num_bands):
        for column in range(0, blocks.columns, num_columns):
            part = np.s_[first : first + num_bands, :, column : column + num_columns]
            turned = bands[part].swapaxes(1, 2)
            apart = scratch.array("apart", turned.size, keys.dtype)
            np.copyto(apart.reshape(turned.shape), turned)
            of_part = scratch.array("lowest apart", turned.size, bool)
            rows = (-1, blocks.size)
            _lowest_in_rows(apart.reshape(rows), blocks.num_pruned, of_part.reshape(rows), scratch)
            lowest[part] = of_part.reshape(turned.shape).swapaxes(1, 2)


def _lowest_in_rows(keys: Array, k: int, lowest: Array, scratch: Scratch) -> None:
    """The k lowest keys of every row; among equal ones those further left.

    Args:
        keys: [rows, n].
        k: 0 < k < n.
        lowest: bool [rows, n]; k of them become True in each row.
    """
    ordered = scratch.array("ordered", keys.size, keys.dtype).reshape(keys.shape)
    np.copyto(ordered, keys)
    ordered.partition(k - 1, axis=1)
    threshold = ordered[:, k - 1 : k].copy()
    np.less_equal(keys, threshold, out=lowest)
    if np.count_nonzero(lowest) == len(keys) * k:
        return
    # The last ties of a row stay, as many as are too many.
    num_extra = lowest.view(np.uint8).sum(axis=1, dtype=np.int32, keepdims=True) - k
    ties = np.equal(keys, threshold, out=scratch.array("ties", keys.size, bool).reshape(keys.shape))
    ordinals = scratch.array("ordinals", keys.size, np.int32).reshape(keys.shape)
    np.cumsum(ties, axis=1, dtype=np.int32, out=ordinals)
    ties &= ordinals > ordinals[:, -1:] - num_extra
    lowest ^= ties


def _lowest_of_few(keys: Array, blocks: Blocks, lowest: Array, scratch: Scratch) -> None:
    """The lowest of short blocks, by comparing all pairs of elements in all blocks at once.

    The place of an element in its block is how many others come before it: as many as stand before
    it, and those after it that are lower, less those before it that are larger.
    """

    def planes(use: str, dtype: np.dtype | type) -> Array:
        """[length, bands, columns]: neighbours are of different blocks."""
        return scratch.array(use, keys.size, dtype).reshape(blocks.length, -1, blocks.columns)

    shape = (-1, blocks.length, blocks.columns)
    apart, places, flags = (
        planes("apart", keys.dtype), planes("places", np.uint8), planes("lowest apart", bool)
    )  # fmt: skip
    np.copyto(apart, keys.reshape(shape).swapaxes(0, 1))
    places[:] = np.arange(blocks.length, dtype=np.uint8)[:, None, None]
    for left, right in itertools.combinations(range(blocks.length), 2):
        is_lower = np.less(apart[right], apart[left], out=flags[0]).view(np.uint8)
        places[left] += is_lower
        places[right] -= is_lower
    np.less(places, blocks.num_pruned, out=flags)
    np.copyto(lowest.reshape(shape), flags.swapaxes(0, 1))


def _lowest_on_device(blocks: Blocks, keys: Tensor) -> Tensor:
    """:func:`lowest_of` by torch operations: bool, like keys."""
    shape = (-1, blocks.length, blocks.columns, blocks.kernel)
    turned = keys.view(shape).transpose(1, 2)
    rows = turned.reshape(-1, blocks.size)  # one for each block
    first = rows.sort(dim=1, stable=True).indices[:, : blocks.num_pruned]
    chosen = torch.zeros(rows.shape, dtype=torch.bool, device=rows.device).scatter_(1, first, True)
    return chosen.view(turned.shape).transpose(1, 2).reshape(-1)
