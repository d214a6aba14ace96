"""Pruning whole tiles, of parameters on any sharding: sums over ranks, and a ranking of the sums.

A tile is a box of the whole parameter, and has a row-major number in the grid of all tiles. Each
rank sums the scores of its part, tile by tile. Of tiles that the sharding cuts, the ranks add their
limbs (see tile_sums.py), so all of them have the sum; the rank that has a tile's first element
ranks it. From there on tiles are ranked like the elements of smaller parameters::

    scores --sums--> tiles of this rank --> any selection --> which go --> masks of elements
             limbs of cut tiles are added     the cut ones are told to all

A part is a sequence of chunks that are boxes of the parameter. Tiles that reach beyond a chunk are
cut, and its elements are filled up with zeros::

    tiles of 2 x 2, columns 1 to 5 of a parameter on this rank

      0 1 | 2 3 | 4 5 |      columns 2 to 5: whole tiles
      0 1 | 2 3 | 4 5 |      column 1: cut tiles, their other column is 0 here
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distprune._common.collectives import Communicator
from distprune._common.memory import Array, Scratch, boxes_of_run
from distprune.selection.block_cuts import to_progressions, union
from distprune.selection.candidates import Candidates, Ranked
from distprune.selection.keys import RANDOM_KEYS, KeyRange, Order, RandomKeys, ScoreKeys, key_range
from distprune.selection.kth_key import refuse_nan_in
from distprune.selection.passes import count_each_live
from distprune.selection.scores import TensorScores
from distprune.selection.tile_sums import (
    added,
    limbs_for,
    limbs_of_tiles,
    num_bits_of,
    rounded,
    sums_of_tiles,
)  # fmt: skip
from distprune.shards.geometry import IndexMap, MatrixRun

# Elements of a chunk, unless a row of tiles has more.
_CHUNK = 1 << 18
_LARGEST_INTEGER = 1 << 53  # of float64
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Tiling:
    """The tiles of one whole parameter; the same on all ranks.

    Attributes:
        shape: of the parameter.
        sizes: of a tile, per dimension; each divides the length of its dimension.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of tiles along each dimension."""
        return tuple(n // size for n, size in zip(self.shape, self.sizes, strict=True))


@dataclass(frozen=True)
class TiledParts:
    """What is pruned in tiles.

    Attributes:
        ranked: the parameters.
        tilings: of the parameters; None where this rank has no element.
        tile_size: elements of a tile.
        is_first_copy: per parameter, whether this rank has the first of all replicas of its part.
    """

    ranked: Ranked
    tilings: Sequence[Tiling | None]
    tile_size: int
    is_first_copy: Sequence[bool]


class Chunk(NamedTuple):
    """Elements of a part that lie side by side, and are a box of the parameter.

    Attributes:
        positions: in the flat part.
        ranges: coordinates per dimension, in the order of memory.
        tiles: coordinates, in the grid, of the tiles that have elements here; likewise.
        places: of these tiles among those of all chunks, row-major in the order of memory.
    """

    positions: range
    ranges: tuple[range, ...]
    tiles: tuple[range, ...]
    places: slice

    def filled_up(self, values: Array, sizes: Sequence[int]) -> Array:
        """Values of the elements, N-d, with zeros for those of cut tiles that are not here."""
        boxed = values.reshape([len(rows) for rows in self.ranges])
        edges = [
            (rows.start - own.start * size, own.stop * size - rows.stop)
            for rows, own, size in zip(self.ranges, self.tiles, sizes, strict=True)
        ]
        return np.pad(boxed, edges) if any(map(any, edges)) else boxed

    def spread(self, flags: Array, sizes: Sequence[int]) -> Array:
        """Flags of the elements, 1-d, from flags of the tiles."""
        flags = flags.reshape([len(own) for own in self.tiles])
        for dim, (rows, own, size) in enumerate(zip(self.ranges, self.tiles, sizes, strict=True)):
            flags = flags.repeat(size, axis=dim) if size > 1 else flags
            first = rows.start - own.start * size
            flags = flags[(slice(None),) * dim + (slice(first, first + len(rows)),)]
        return flags.reshape(-1)


@dataclass
class LocalTiles:
    """The tiles of a local part; one that lies in several chunks is listed for each.

    Attributes:
        chunks: of the whole part.
        sizes: of a tile, per dimension in the order of memory.
        numbers: int64, of the tiles, chunk by chunk; counted over all parameters of a call.
        is_whole: bool, whether all elements of a tile are in the chunk ...
        is_ranked: ... and whether its first one is: it is ranked here then.
        sums, is_live: per tile: once they are shared, those of the whole tile.
        rows: of the cut tiles of each chunk, their numbers, and int64 [limbs + 3, tiles]: limbs,
            live elements, and scores that are inf and -inf.
        order: where the ranked tiles are among those that ``is_ranked``, by ascending number.
    """

    chunks: list[Chunk]
    sizes: tuple[int, ...]
    numbers: Array
    is_whole: Array
    is_ranked: Array
    sums: Array = field(init=False)
    is_live: Array = field(init=False)
    rows: list[tuple[Array, Array]] = field(default_factory=list)
    order: Array = field(init=False)

    def __post_init__(self) -> None:
        self.sums, self.is_live = np.zeros(len(self.numbers)), np.ones(len(self.numbers), bool)
        self.order = np.argsort(self.numbers[self.is_ranked], kind="stable")

    def ranked(self, values: Array) -> Array:
        """Values of the ranked tiles, by ascending number, from values of all."""
        found: Array = values[self.is_ranked][self.order]
        return found


def tiles_of(index: IndexMap, num_local: int, tiling: Tiling | None, offset: int = 0) -> LocalTiles:
    """Find the tiles of a local part. Local; reads no element.

    Args:
        index, num_local: of the part.
        tiling: of the parameter; None: it has no element here.
        offset: tiles of the parameters before this one.

    Cost: 28 bytes for each local tile.
    """
    chunks: list[Chunk] = []
    numbers, is_whole, is_ranked = [np.zeros(0, np.int64)], [np.zeros(0, bool)], [np.zeros(0, bool)]
    if tiling is None or not num_local:
        return LocalTiles(chunks, (), numbers[0], is_whole[0], is_ranked[0])
    dims = index.dims if index.fold is None else range(len(tiling.sizes))
    sizes = tuple(tiling.sizes[dim] for dim in dims)
    strides = [math.prod(tiling.grid[dim + 1 :]) for dim in dims]
    position = place = 0
    for ranges in itertools.chain.from_iterable(
        _cut_box(box, sizes) for box in _boxes_of(index, num_local)
    ):
        tiles = tuple(
            range(rows.start // size, -(-rows.stop // size))
            for rows, size in zip(ranges, sizes, strict=True)
        )
        number: Array = np.full((1,) * len(tiles), offset, dtype=np.int64)
        has_first = has_last = np.ones(number.shape, dtype=bool)
        for dim, (rows, size, stride) in enumerate(zip(ranges, sizes, strides, strict=True)):
            shape = [-1 if other == dim else 1 for other in range(len(tiles))]
            along = np.arange(tiles[dim].start, tiles[dim].stop).reshape(shape)
            number = number + along * stride
            has_first = has_first & (along * size >= rows.start)
            has_last = has_last & ((along + 1) * size <= rows.stop)
        stop = position + math.prod(len(rows) for rows in ranges)
        places = slice(place, place + number.size)
        chunks.append(Chunk(range(position, stop), ranges, tiles, places))
        position, place = stop, places.stop
        numbers.append(number.reshape(-1))
        is_whole.append((has_first & has_last).reshape(-1))
        is_ranked.append(has_first.reshape(-1))
    whole, ranked = np.concatenate(is_whole), np.concatenate(is_ranked)
    return LocalTiles(chunks, sizes, np.concatenate(numbers), whole, ranked)


def _boxes_of(index: IndexMap, num_local: int) -> Iterator[tuple[range, ...]]:
    """The boxes, in the order of memory, that a part is a sequence of."""
    coordinates = index.coordinates
    if not coordinates:
        yield ()
        return
    first = MatrixRun.of(index).offset
    for ranges in boxes_of_run([len(rows) for rows in coordinates], first, first + num_local):
        box = tuple(
            range(rows.start + own.start, rows.start + own.stop)
            for rows, own in zip(coordinates, ranges, strict=True)
        )
        if index.fold is None:
            yield box
        else:
            yield from index.fold.closed(box)


def _cut_box(ranges: tuple[range, ...], sizes: Sequence[int]) -> Iterator[tuple[range, ...]]:
    """Chunks of a box, one after the other in memory, cut between tiles."""
    if not ranges:
        yield ()
        return
    rows, size = ranges[0], sizes[0]
    row_size = math.prod(len(others) for others in ranges[1:])
    if size == 1 and row_size > _CHUNK:
        for row in rows:
            for chunk in _cut_box(ranges[1:], sizes[1:]):
                yield (range(row, row + 1), *chunk)
        return
    step = max(1, _CHUNK // (size * row_size)) * size
    start = rows.start
    while start < rows.stop:
        stop = min((start + step) // size * size, rows.stop)
        yield (range(start, stop), *ranges[1:])
        start = stop


@dataclass(frozen=True)
class RankedTiles:
    """The tiles of a call, as selection ranks them.

    Attributes:
        ranked: the tiles of every parameter, as if they were its elements; live are those that
            have an element which is not pruned.
        num_tiles: of every whole parameter.
    """

    ranked: Ranked
    num_tiles: Sequence[int]
    _tiled: TiledParts
    _tiles: Sequence[LocalTiles]
    _cut: Array  # the numbers of the tiles that are cut on any rank, ascending

    def share_cut(self, keeps: Sequence[Tensor]) -> list[Array]:
        """Flags of all tiles that have elements here, from masks of the ranked ones. Collective.

        Cost: an all-reduce of 8 bytes per cut tile.
        """
        flags = [np.ones(len(own.numbers), dtype=bool) for own in self._tiles]
        for own, keep, flag in zip(self._tiles, keeps, flags, strict=True):
            by_place = np.empty(len(own.order), dtype=bool)
            by_place[own.order] = keep.numpy()
            flag[own.is_ranked] = by_place
        if not len(self._cut):
            return flags

        def dropped() -> Tensor:
            share = np.zeros(len(self._cut), dtype=np.int64)
            for own, flag, is_first in zip(
                self._tiles, flags, self._tiled.is_first_copy, strict=True
            ):
                gone = own.is_ranked & ~own.is_whole & ~flag & is_first
                share[np.searchsorted(self._cut, own.numbers[gone])] = 1
            return torch.from_numpy(share)

        kept = self.ranked.communicator.reduce(len(self._cut), dropped).numpy() == 0
        for own, flag in zip(self._tiles, flags, strict=True):
            flag[~own.is_whole] = kept[np.searchsorted(self._cut, own.numbers[~own.is_whole])]
        return flags

    def write(self, flags: Sequence[Array], outs: Sequence[Tensor]) -> list[int]:
        """Write the masks of the elements. Local.

        Args:
            flags: from :meth:`share_cut`.
            outs: flat masks of the parts, uninitialised.

        Returns:
            Per parameter, how many elements that this rank counts were pruned now.
        """
        counts = []
        for part, own, flag, out in zip(
            self._tiled.ranked.parts, self._tiles, flags, outs, strict=True
        ):
            num_pruned = 0
            for chunk in own.chunks:
                kept = chunk.spread(flag[chunk.places], own.sizes)
                span = slice(chunk.positions.start, chunk.positions.stop)
                mask = torch.from_numpy(kept).to(out.device)
                gone = ~kept
                if part.live is None:
                    out[span] = mask
                else:  # whose dtype may be another one than that of the new mask
                    gone &= (part.live[span] == 1).cpu().numpy()
                    out[span] = part.live[span] * mask
                num_pruned += int(np.count_nonzero(gone[part.counted_in(chunk.positions)]))
            counts.append(num_pruned)
        return counts


def rank_tiles(tiled: TiledParts) -> RankedTiles:
    """Sum the scores of all tiles. Collective.

    Raises:
        ValueError: a live score is NaN, or a tile has both infinities; names the parameters. On
            every rank.

    Cost: one read of the scores; memory of 28 bytes per local tile, 100 per cut tile (520 of scores
    in float64), and for a chunk. All-reduces of 16 bytes per parameter, and one of as many per cut
    tile as it takes memory; see also
    :meth:`~distprune._common.collectives.Communicator.distinct_texts`.
    """
    ranked, communicator = tiled.ranked, tiled.ranked.communicator
    num_tiles = [part.numel // tiled.tile_size for part in ranked.parts]
    offsets = list(itertools.accumulate(num_tiles, initial=0))[:-1]
    tiles: list[LocalTiles] = []

    def read() -> Tensor:
        num_nan = []
        for i, part in enumerate(ranked.parts):
            tiles.append(tiles_of(part.index, part.num_local, tiled.tilings[i], offsets[i]))
            number = _read(ranked.keys, part, tiles[i], ranked.names[i])
            num_nan.append(number if tiled.is_first_copy[i] else 0)
        return torch.tensor(num_nan, dtype=torch.int64)

    num_nan = communicator.reduce(len(ranked.parts), read).tolist()
    refuse_nan_in(ranked.names, ranked.num_live, num_nan)
    cut = _agree_on_cut(tiles, communicator)
    _share_sums(tiled, tiles, cut)
    is_random = ranked.keys is RANDOM_KEYS
    keys = RANDOM_KEYS if is_random else key_range(torch.float64, ranked.keys.order)

    def make() -> list[Candidates]:
        each = zip(ranked.parts, tiles, ranked.names, offsets, num_tiles, strict=True)
        return [_candidates(keys, *own) for own in each]

    parts = communicator.run(make)

    def count_live() -> Tensor:
        numbers = count_each_live([p.live for p in parts], [p.counted for p in parts])
        return torch.tensor(numbers, dtype=torch.int64)

    num_live = communicator.reduce(len(parts), count_live).tolist()
    of_tiles = Ranked(parts, ranked.names, num_live, keys, communicator, refuse_nan=False)
    return RankedTiles(of_tiles, num_tiles, tiled, tiles, cut)


def _read(keys: KeyRange, part: Candidates, own: LocalTiles, name: str) -> int:
    """Sum the scores of a part, 0 where they are pruned, tile by tile; the number of NaN."""
    source = part.keys.scores if isinstance(part.keys, ScoreKeys) else None
    exponent, num_limbs = limbs_for(keys.value_dtype)
    num_nan, scratch = 0, Scratch()
    for chunk in own.chunks:
        start, stop = chunk.positions.start, chunk.positions.stop
        scores, live = np.zeros(stop - start), np.ones(stop - start, dtype=bool)
        if part.live is not None:
            live = (part.live[start:stop] == 1).cpu().numpy()
        if source is not None:
            loaded = source.load(start, stop, scratch).detach().cpu()
            scores = loaded.to(torch.float64, copy=True).numpy()
            if not loaded.dtype.is_floating_point and np.abs(scores).max() >= _LARGEST_INTEGER:
                raise ValueError(
                    f"{name} has integer scores of 2**53 or more, which cannot be summed over "
                    "tiles; expected smaller ones, or floating point."
                )
            if keys.order is Order.MAGNITUDE:
                np.abs(scores, out=scores)
            scores[~live] = 0.0
            is_nan = np.isnan(scores)
            if is_nan.any():
                num_nan += int(np.count_nonzero(is_nan))
                continue
        boxed = chunk.filled_up(scores, own.sizes)
        if source is not None:
            sums = sums_of_tiles(boxed, own.sizes, num_bits_of(source.dtype))
            own.sums[chunk.places] = sums.reshape(-1)
        is_cut = ~own.is_whole[chunk.places]
        if part.live is None and not is_cut.any():
            continue
        num_live = added(chunk.filled_up(live, own.sizes).astype(np.int64), own.sizes)
        own.is_live[chunk.places] = num_live.reshape(-1) > 0
        if is_cut.any():
            signs = [(boxed == each).astype(np.int64) for each in (np.inf, -np.inf)]
            rows = limbs_of_tiles(
                np.where(np.isinf(boxed), 0.0, boxed), own.sizes, exponent, num_limbs
            )
            rows += [num_live, *(added(each, own.sizes) for each in signs)]
            cut = np.stack([row.reshape(-1)[is_cut] for row in rows])
            own.rows.append((own.numbers[chunk.places][is_cut], cut))
    return num_nan


def _agree_on_cut(tiles: Sequence[LocalTiles], communicator: Communicator) -> Array:
    """The numbers of the tiles that are cut on any rank, ascending. Collective."""

    def describe() -> str:
        cut = [own.numbers[~own.is_whole] for own in tiles]
        return json.dumps(to_progressions(np.unique(np.concatenate(cut))))

    texts, _ = communicator.distinct_texts(communicator.run(describe))
    return union([json.loads(text) for text in texts])


def _share_sums(tiled: TiledParts, tiles: Sequence[LocalTiles], cut: Array) -> None:
    """Sum the tiles that are cut on any rank, and see which of them are live. Collective."""
    if not len(cut):
        return
    exponent, num_limbs = limbs_for(tiled.ranked.keys.value_dtype)
    shape = (num_limbs + 3, len(cut))

    def take() -> Tensor:
        share = np.zeros(shape, dtype=np.int64)
        for own, is_first in zip(tiles, tiled.is_first_copy, strict=True):
            for numbers, rows in own.rows if is_first else ():
                share[:, np.searchsorted(cut, numbers)] += rows
        return torch.from_numpy(share.reshape(-1))

    words = tiled.ranked.communicator.reduce(math.prod(shape), take)
    *limbs, num_live, positive, negative = words.numpy().reshape(shape)
    sums = rounded(limbs, exponent)
    with np.errstate(invalid="ignore"):
        sums += np.where(positive > 0, np.inf, 0.0)
        sums -= np.where(negative > 0, np.inf, 0.0)
    for own in tiles:
        at = np.searchsorted(cut, own.numbers[~own.is_whole])
        own.sums[~own.is_whole], own.is_live[~own.is_whole] = sums[at], num_live[at] > 0


def _candidates(
    keys: KeyRange, part: Candidates, own: LocalTiles, name: str, offset: int, num_tiles: int
) -> Candidates:
    """The ranked tiles of a part as candidates."""
    numbers, sums, is_live = map(own.ranked, (own.numbers, own.sums, own.is_live))
    numbers, count = numbers - offset, len(numbers)
    index: IndexMap = ListedIndex((), (), None, listed=numbers)
    if count and numbers[-1] - numbers[0] == count - 1:
        index = IndexMap((), (), int(numbers[0]))
    source: ScoreKeys | RandomKeys
    if isinstance(part.keys, RandomKeys):
        source = RandomKeys(part.keys.seed, offset, index, _CPU)
    else:
        if np.isnan(sums[is_live]).any():
            raise ValueError(
                f"{name} has a tile with scores of inf and of -inf, which have no sum; expected "
                "finite scores."
            )
        source = ScoreKeys(TensorScores(torch.from_numpy(sums)), keys)
    # Replicas of a part have the same tiles, and count equal parts of them.
    n = max(1, part.num_local)
    counted = range(count * part.counted.start // n, count * part.counted.stop // n)
    live = None if is_live.all() else torch.from_numpy(is_live)
    return Candidates(source, live, index, counted, count, num_tiles, _CPU)


@dataclass(frozen=True)
class ListedIndex(IndexMap):
    """An :class:`IndexMap` of indices that are listed.

    Attributes:
        listed: int64, ascending.
    """

    listed: Array | None = None

    def __call__(self, positions: Tensor) -> Tensor:
        assert self.listed is not None
        found = self.listed[positions.cpu().numpy()]
        return torch.from_numpy(found).to(positions.device)

    @property
    def is_ascending(self) -> bool:
        return True

    def positions_of(self, indices: Array) -> Array:
        assert self.listed is not None
        return np.searchsorted(self.listed, indices)
