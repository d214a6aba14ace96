"""Where the tiles of a parameter lie in a rank's part of it: whole, or loose.

A tile is a box of the whole parameter, and has a row-major number in the grid of all tiles. A part
is cut into chunks that are boxes too; of each, the tiles that are whole in it are its inner box,
and all other elements belong to loose tiles, of which other chunks or ranks may have some::

    tiles of 2 x 2, columns 1 to 5 of a parameter on this rank

      1 | 2 3 | 4 5 |        inner box: columns 2 to 5
      1 | 2 3 | 4 5 |        loose: column 1

The sums of loose tiles are added over the ranks, so it is no matter if some of them are whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distprune._common.memory import Array
from distprune.shards.geometry import IndexMap, MatrixRun

# Elements of a chunk, unless a row of tiles has more.
_CHUNK = 1 << 18


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


class Chunk(NamedTuple):
    """Elements of a part that lie side by side, and are a box of the parameter.

    Attributes:
        positions: in the flat part.
        ranges: coordinates per dimension, in the order of memory.
        inner: those of the whole tiles, or None if there are none.
        first: number of the first whole tile among those of all chunks.
        has_loose: whether it has elements of loose tiles.
    """

    positions: range
    ranges: tuple[range, ...]
    inner: tuple[range, ...] | None
    first: int
    has_loose: bool


@dataclass(frozen=True)
class TilePlaces:
    """The tiles of a local part.

    Attributes:
        chunks: of the whole part.
        sizes: of a tile, per dimension in the order of memory.
        strides: of the grid, likewise.
        numbers: int64, of the tiles in the inner boxes, chunk by chunk, each in the order of
            memory.
        loose: int64, of the loose tiles; ascending.
        first_index: index of the part's first element in the whole parameter; -1 of no element.
            Parts are the same, or have no element in common, and so no index.
    """

    chunks: tuple[Chunk, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    numbers: Array
    loose: Array
    first_index: int

    def inner_of(self, chunk: Chunk, values: Array) -> Array:
        """The elements of a chunk that are in whole tiles: a view, N-d, in the order of memory."""
        assert chunk.inner is not None
        slices = tuple(
            slice(kept.start - rows.start, kept.stop - rows.start)
            for rows, kept in zip(chunk.ranges, chunk.inner, strict=True)
        )
        return values.reshape([len(rows) for rows in chunk.ranges])[slices]

    def num_inner(self, chunk: Chunk) -> int:
        """Whole tiles of a chunk."""
        return 0 if chunk.inner is None else math.prod(self.inner_shape(chunk))

    def inner_shape(self, chunk: Chunk) -> list[int]:
        """Whole tiles of a chunk, per dimension."""
        assert chunk.inner is not None
        return [len(r) // size for r, size in zip(chunk.inner, self.sizes, strict=True)]

    def loose_in(self, chunk: Chunk) -> tuple[Array, Array]:
        """Where the elements of loose tiles are in a chunk, and the numbers of their tiles."""
        is_loose = np.ones([len(rows) for rows in chunk.ranges], dtype=bool)
        if chunk.inner is not None:
            self.inner_of(chunk, is_loose)[...] = False
        grids = [
            np.arange(rows.start, rows.stop) // size
            for rows, size in zip(chunk.ranges, self.sizes, strict=True)
        ]
        return np.flatnonzero(is_loose), _numbers(grids, self.strides)[is_loose]


@dataclass(frozen=True)
class ListedIndex(IndexMap):
    """An :class:`IndexMap` of indices that are listed.

    Attributes:
        listed: int64, ascending.
    """

    listed: Array | None = None

    @classmethod
    def of(cls, numbers: Array) -> IndexMap:
        """The map from positions to ascending numbers."""
        if len(numbers) and numbers[-1] - numbers[0] == len(numbers) - 1:
            return IndexMap((), (), int(numbers[0]))
        return cls((), (), None, listed=numbers)

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


NO_TILES = TilePlaces(
    (), (), (), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), -1
)  # fmt: skip


def tile_places(index: IndexMap, num_local: int, tiling: Tiling) -> TilePlaces:
    """Find the tiles of a local part. Local; reads no element.

    Cost: 8 bytes for each local tile.
    """
    if not num_local:
        return NO_TILES
    sizes = tuple(tiling.sizes[dim] for dim in index.dims)
    grid = tiling.grid
    strides = tuple(math.prod(grid[dim + 1 :]) for dim in index.dims)
    chunks: list[Chunk] = []
    numbers: list[Array] = []
    loose: list[Array] = []
    first = position = 0
    empty: Array = np.zeros(0, dtype=np.int64)
    places = TilePlaces((), sizes, strides, empty, empty, -1)
    for box in _boxes_of(index, num_local):
        for ranges in _cut_box(box, sizes):
            count = math.prod(len(rows) for rows in ranges)
            inner = _inner(ranges, sizes)
            chunk = Chunk(range(position, position + count), ranges, inner, first, inner != ranges)
            chunks.append(chunk)
            position += count
            if inner is not None:
                first += places.num_inner(chunk)
                grids = [
                    np.arange(rows.start // size, rows.stop // size)
                    for rows, size in zip(inner, sizes, strict=True)
                ]
                numbers.append(_numbers(grids, strides).reshape(-1))
            if chunk.has_loose:
                loose.append(np.unique(places.loose_in(chunk)[1]))
    return TilePlaces(
        tuple(chunks),
        sizes,
        strides,
        np.concatenate(numbers) if numbers else empty,
        np.unique(np.concatenate(loose)) if loose else empty,
        int(index(torch.zeros(1, dtype=torch.int64))[0]),
    )


def _boxes_of(index: IndexMap, num_local: int) -> Iterator[tuple[range, ...]]:
    """The boxes, in the order of memory, that a part is a sequence of."""
    coordinates = index.coordinates
    if not coordinates:
        yield ()
        return
    first = MatrixRun.of(index).offset
    sizes = [len(rows) for rows in coordinates]
    for ranges in _boxes_of_run(sizes, first, first + num_local):
        yield tuple(
            range(rows.start + own.start, rows.start + own.stop)
            for rows, own in zip(coordinates, ranges, strict=True)
        )


def _boxes_of_run(sizes: Sequence[int], first: int, last: int) -> Iterator[tuple[range, ...]]:
    """The boxes that positions [first, last) of a larger box are: whole rows, and parts of two."""
    if first >= last:
        return
    if len(sizes) == 1:
        yield (range(first, last),)
        return
    row_size = math.prod(sizes[1:])
    while first < last:
        row, column = divmod(first, row_size)
        if column or last - first < row_size:
            stop = min(last - row * row_size, row_size)
            for ranges in _boxes_of_run(sizes[1:], column, stop):
                yield (range(row, row + 1), *ranges)
            first = row * row_size + stop
        else:
            yield (range(row, last // row_size), *(range(size) for size in sizes[1:]))
            first = last // row_size * row_size


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


def _inner(ranges: tuple[range, ...], sizes: Sequence[int]) -> tuple[range, ...] | None:
    """The whole tiles of a box."""
    inner = tuple(
        range(-(-rows.start // size) * size, rows.stop // size * size)
        for rows, size in zip(ranges, sizes, strict=True)
    )
    return inner if all(inner) else None


def _numbers(grids: Sequence[Array], strides: Sequence[int]) -> Array:
    """The numbers of the tiles in a box of the grid, N-d."""
    total: Array = np.zeros((1,) * len(grids), dtype=np.int64)
    for dim, (own, stride) in enumerate(zip(grids, strides, strict=True)):
        shape = [1] * len(grids)
        shape[dim] = len(own)
        total = total + own.reshape(shape) * stride
    return total
