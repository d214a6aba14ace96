"""Where a rank's part of a tensor is in the whole: pure functions on shapes and splits.

Uses neither process groups nor DTensor. Placements of a DTensor become the splits that are used
here (:func:`placed`); the reader converts the terms of other wrappers.

A rank's part of a parameter is also a run of matrices (:class:`MatrixRun`), and small factors are
laid out like these. There is one matrix. Its rows are the slowest dimension of the part's memory,
its columns all others:

    flat positions          0  1 | 2  3  4  5  6 | 7          num_columns = 5, offset = 3
    in the matrix     . . . x  x |
                                 | x  x  x  x  x |
                                                 | x . . . .

Of three dimensions, [experts, out, in] for example, there may be a matrix for each index of the
slowest one: then a factor [experts, 1, in] stays as small as it is.

[Note: folds] Some cuts give every rank a part of each of several groups of rows. Rows 0 to 7 in two
groups over two ranks are 0 1 4 5 and 2 3 6 7: transformers cuts its fused experts [experts, gate
and up, in] in this way. In another shape of the same elements, [experts, 2, half, in], such a part
is a box like any other, with the same row-major indices. So dimensions and coordinates of a folded
part are those of that shape.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.memory import Array

# One cut of a tensor dimension into chunks, as torch.chunk makes them: the dimension, the number of
# chunks, and the number of this rank's chunk.
Split = tuple[int, ...]
# How a dimension is seen as two, groups and what is in a group: its number, and the two sizes.
Fold = tuple[int, int, int]


def opened(fold: Fold, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape with two dimensions in place of one; of a factor, 1 and 1 in place of 1."""
    dim, *sizes = fold
    two = (1, 1) if shape[dim] == 1 else sizes
    return (*shape[:dim], *two, *shape[dim + 1 :])


def dim_coordinates(shape: Sequence[int], splits: Sequence[Split]) -> tuple[range, ...]:
    """Global coordinates, per tensor dimension, of the elements of one rank.

    Args:
        shape: the global shape.
        splits: in the order in which the tensor was cut; of whole dimensions.

    Returns:
        One range per dimension, as a chunk of a chunk is a run. The local element
        (i, j, ...) is the global element (result[0][i], result[1][j], ...).
    """
    coordinates = [range(size) for size in shape]
    for dim, num_chunks, chunk in splits:
        size = -(-len(coordinates[dim]) // num_chunks)
        coordinates[dim] = coordinates[dim][chunk * size : (chunk + 1) * size]
    return tuple(coordinates)


@dataclass(frozen=True)
class IndexMap:
    """From positions in a flat local view to row-major indices in the global tensor.

    Attributes:
        coordinates: a range per dimension, slowest-varying dimension of the flat
            view first.
        strides: row-major stride of the same dimensions in the global tensor.
        start: first global index when the local elements are a contiguous run.
        offset: position of the first local element in the box that the coordinates describe: more
            than 0 if the local elements are a run of that box.
        dims: the dimensions of the global tensor, in the order of ``coordinates``.
        fold: how another shape is seen, to which all of the above belong: see [Note: folds].
    """

    coordinates: tuple[range, ...]
    strides: tuple[int, ...]
    start: int | None
    offset: int = 0
    dims: tuple[int, ...] = ()
    fold: Fold | None = None

    def __call__(self, positions: Tensor) -> Tensor:
        """Global indices, int64 [m], of local positions, int64 [m]."""
        if self.start is not None:
            return positions + self.start
        indices = torch.zeros_like(positions)
        rest = positions + self.offset
        dims = list(zip(self.coordinates, self.strides, strict=True))
        for coordinate, stride in reversed(dims[1:]):
            outer = _divided(rest, len(coordinate))
            # One division, and no remainder: they take longer than all else.
            indices += rest.sub_(outer, alpha=len(coordinate)).add_(coordinate.start).mul_(stride)
            rest = outer
        coordinate, stride = dims[0]
        return indices.add_(rest.add_(coordinate.start), alpha=stride)

    @property
    def run(self) -> int:
        """Indices of neighbours follow each other, but at multiples of this in the flat view."""
        if self.start is not None:
            return 1 << 62
        run = 1
        for coordinate, stride in zip(self.coordinates[::-1], self.strides[::-1], strict=True):
            if len(coordinate) != 1:
                if stride != run:
                    break
                run *= len(coordinate)
        return run

    @property
    def is_ascending(self) -> bool:
        """Whether a later position always has a larger global index."""
        return self.start is not None or all(
            outer >= inner for outer, inner in itertools.pairwise(self.strides)
        )

    def positions_of(self, indices: Array) -> Array:
        """How many elements of the flat view have a smaller global index, if it is ascending.

        Args:
            indices: int64 [m].

        Returns:
            int64 [m], the positions of the first elements whose global index is not smaller. Below
            0, or beyond the last local element, if all local elements have a larger, or smaller
            one.
        """
        if self.start is not None:
            return indices - self.start
        positions: Array = np.zeros(len(indices), dtype=np.int64)
        num_inside = math.prod(len(rows) for rows in self.coordinates)
        is_inside: Array = np.ones(len(indices), dtype=bool)
        # Dimensions of equal stride may be in any order in memory: all but one have one element.
        places = zip(self.dims, self.coordinates, self.strides, strict=True)
        for _, rows, stride in sorted(places, key=lambda place: place[0]):
            num_inside //= max(1, len(rows))
            coordinate, indices = np.divmod(indices, stride)
            positions += is_inside * (coordinate - rows.start).clip(0, len(rows)) * num_inside
            is_inside &= (coordinate >= rows.start) & (coordinate < rows.stop)
        return positions - self.offset

    def part_of(self, whole: Tensor, shape: Sequence[int]) -> Tensor:
        """The box of a whole tensor, or of a factor that broadcasts to it: a view if it can be one.

        Args:
            whole: of as many dimensions as ``shape``; each of its size, or of size 1.
            shape: the global shape.

        Returns:
            Its dimensions are those of the coordinates, in their natural order.
        """
        if self.fold is not None:
            whole, shape = whole.reshape(opened(self.fold, whole.shape)), opened(self.fold, shape)
        for dim, rows in zip(self.dims, self.coordinates, strict=True):
            if whole.shape[dim] == shape[dim] != len(rows):
                whole = whole.narrow(dim, rows.start, len(rows))
        return whole


def _divided(numbers: Tensor, divisor: int) -> Tensor:
    """``numbers // divisor``; numpy's takes a quarter of the time of torch's."""
    if memory.takes_numpy(numbers.device):
        return torch.from_numpy(numbers.numpy() // divisor)
    return numbers // divisor


def index_map(
    shape: Sequence[int], coordinates: Sequence[range], memory_order: Sequence[int]
) -> IndexMap:
    """Build the :class:`IndexMap` of a flat view.

    Args:
        shape: the global shape.
        coordinates: per dimension, as :func:`dim_coordinates` returns them.
        memory_order: dimensions from the slowest to the fastest in the flat view.
    """
    dims = tuple(memory_order)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start, is_row_major = None, dims == tuple(range(len(shape)))
    # A run: rows follow each other in dimension 0, and everything below is whole.
    if is_row_major and all(len(coordinates[dim]) == shape[dim] for dim in dims[1:]):
        start = coordinates[0].start * strides[0] if shape and coordinates[0] else 0
    ordered = tuple(coordinates[dim] for dim in dims)
    return IndexMap(ordered, tuple(strides[dim] for dim in dims), start, dims=dims)


@functools.lru_cache(maxsize=1 << 12)
def run_index_map(
    shape: tuple[int, ...], stride: tuple[int, ...], first: int = 0
) -> IndexMap | None:
    """The :class:`IndexMap` of a whole tensor, or of a run of it, in the order of its memory.

    Args:
        shape: the global shape.
        stride: of the whole tensor.
        first: where in its memory the run begins.

    Returns:
        None if the whole tensor has gaps or overlaps.
    """
    order = memory_order(torch.empty_strided(shape, stride, device="meta"))
    if order is None:
        return None
    whole = index_map(shape, list(map(range, shape)), order)
    return replace(whole, offset=first, start=None if whole.start is None else first)


def memory_order(tensor: Tensor) -> list[int] | None:
    """Dimensions from the slowest to the fastest; None if the tensor has gaps or overlaps.

    A dense tensor (contiguous, transposed, channels_last) can be read flat in
    this order without a copy.
    """
    if tensor.is_contiguous():
        # Dimensions of size 1 may have any stride: the natural order is one.
        return list(range(tensor.ndim))
    strides, sizes = tensor.stride(), tensor.shape
    dims = sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], -sizes[dim], dim))
    return dims if tensor.permute(dims).is_contiguous() else None


# A rectangle of a matrix whose elements lie side by side in a flat part: positions, from the
# beginning of the part that was cut into blocks; the number of the matrix; rows; and columns.
Block = tuple[int, int, int, slice, slice]


class MatrixRun:
    """Where the elements of a flat local part lie in a matrix, or in one after the other.

    Args:
        index: of a local part: from flat positions to indices of the whole parameter.
        factors: that broadcast to the whole parameter: there are several matrices if one of
            them would be as large as the part otherwise.

    Attributes:
        num_rows, num_columns: of a matrix, at least 1.
        num_row_dims: how many dimensions of memory are rows, or matrices and rows: 1 or 2.
    """

    def __init__(self, index: IndexMap, factors: Sequence[Tensor]) -> None:
        self.index, self.num_row_dims = index, 1
        sizes = [len(rows) for rows in index.coordinates]
        if len(sizes) == 3 and min(sizes[1:]) > 1:
            for factor in factors:
                shape = factor.shape if index.fold is None else opened(index.fold, factor.shape)
                experts, outputs, inputs = (shape[dim] for dim in index.dims)
                if (experts > 1 or sizes[0] == 1) and (outputs > 1) != (inputs > 1):
                    self.num_row_dims = 2
        self.num_rows = max(1, math.prod(sizes[self.num_row_dims - 1 : self.num_row_dims]))
        self.num_columns = max(1, math.prod(sizes[self.num_row_dims :]))

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """The rectangles, at most three of a matrix, that positions [start, stop) cover."""
        num_columns, size = self.num_columns, self.num_rows * self.num_columns
        origin = start + self.index.offset
        position, end = origin, stop + self.index.offset
        while position < end:
            matrix, inside = divmod(position, size)
            row, column = divmod(inside, num_columns)
            left = min(end, (matrix + 1) * size) - position  # in this matrix
            if column or left < num_columns:
                length = min(left, num_columns - column)
                rows, columns = slice(row, row + 1), slice(column, column + length)
            else:
                length = left - left % num_columns
                rows, columns = slice(row, row + length // num_columns), slice(0, num_columns)
            first = position - origin
            yield first, first + length, matrix, rows, columns
            position += length

    def places(self, positions: Tensor) -> tuple[Tensor | int, Tensor, Tensor]:
        """The matrix, the row and the column of flat positions."""
        positions = positions + self.index.offset
        rows, columns = positions // self.num_columns, positions % self.num_columns
        if self.num_row_dims == 1:
            return 0, rows, columns
        return rows // self.num_rows, rows % self.num_rows, columns

    def matrix_of(self, factor: Tensor, shape: Sequence[int]) -> Tensor:
        """A factor that broadcasts to the whole parameter, as it broadcasts to the matrices.

        Args:
            factor: of as many dimensions as the parameter; each of its size, or of size 1.
            shape: of the whole parameter.

        Returns:
            [matrices or 1, rows or 1, columns or 1].
        """
        ordered = self.index.part_of(factor, shape).permute(self.index.dims)
        if self.num_row_dims == 2:
            return ordered
        if ordered.ndim == 0 or all(size == 1 for size in ordered.shape[1:]):
            return ordered.reshape(1, -1, 1)
        sizes = [len(column) for column in self.index.coordinates[1:]]
        return ordered.expand(ordered.shape[0], *sizes).flatten(1).unsqueeze(0)


def is_cut(placement: Any) -> bool:
    """Whether a placement of a DTensor shards; to torch 2.13 a strided shard is no shard."""
    return placement.is_shard() or hasattr(placement, "split_factor")


def placed(
    name: str,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int] | None,
    placements: Sequence[Any],
    is_from_fsdp2: bool = True,
) -> tuple[IndexMap, int, int]:
    """Where the part of a rank is, row-major; which copy of it this is, and how many there are.

    FSDP2 over tensor parallelism writes its cut, made last, as ``_StridedShard`` on an axis to the
    left of the other cuts of that dimension; the split factor is the product of the sizes of their
    axes. So strided cuts come last here. Walking placements from left to right, as torch's own
    helper does, is right only when that cut is even.

    A view of a DTensor that merges a dimension with a sharded one writes the same type, and means
    rows that lie apart. If all cuts are even then two placements with the pattern of FSDP2 mean the
    same, however they were made; if they are not, only FSDP2's own is a run. Where no other cut is
    of the dimension, each of ``split_factor`` groups is cut evenly: see geometry.[Note: folds].

    Returns:
        For a rank outside the mesh the part of the first rank.

    Raises:
        NotImplementedError: a placement that is neither Shard nor Replicate; a ``_StridedShard`` of
            another kind than these two; groups of rows in two dimensions.
    """
    where, replica, num_replicas = coordinate or [0] * len(mesh_shape), 0, 1
    axes_of: list[list[int]] = [[] for _ in shape]  # of more than one rank, that cut a dimension
    for axis, (placement, size) in enumerate(zip(placements, mesh_shape, strict=True)):
        if is_cut(placement):
            axes_of[placement.dim] += [axis] * (size > 1)
        elif placement.is_replicate():
            replica, num_replicas = replica * size + where[axis], num_replicas * size
        else:
            raise NotImplementedError(
                f"{name}: placement {placement} is not supported; expected Shard or Replicate. "
                "Call .redistribute() to resolve it before pruning."
            )
    plain, strided, folds = list[Split](), list[Split](), list[Fold]()
    for axis, placement in enumerate(placements):
        if not is_cut(placement):
            continue
        dim, axes = placement.dim % len(shape), axes_of[placement.dim]
        cut, factor = (dim, mesh_shape[axis], where[axis]), getattr(placement, "split_factor", None)
        (plain if factor is None else strided).append(cut)
        if factor is None:
            continue
        num_chunks = math.prod(mesh_shape[each] for each in axes)
        if axes == [axis] and factor > 1:
            is_known = shape[dim] % (factor * num_chunks) == 0
            folds.append((dim, factor, shape[dim] // factor))
        else:
            later = [other for other in axes if other > axis]
            is_known = factor == math.prod(mesh_shape[other] for other in later)
            is_known &= all(not hasattr(placements[other], "split_factor") for other in later)
            if shape[dim] % num_chunks:
                is_outermost = all(other.is_replicate() for other in placements[:axis])
                is_known &= is_from_fsdp2 and is_outermost
        if not is_known and mesh_shape[axis] > 1:
            raise NotImplementedError(
                f"{name}: {placement} of {tuple(placements)}, of a dimension of size {shape[dim]} "
                f"on a mesh of shape {tuple(mesh_shape)}, spreads rows that lie apart over the "
                "ranks; expected what fully_shard makes over tensor parallelism, one even cut of "
                f"equal groups of rows, or Shard({dim}), which .redistribute() makes."
            )
    splits, fold = plain + strided, folds[0] if folds else None
    if len(folds) > 1:
        raise NotImplementedError(
            f"{name}: {tuple(placements)} cuts groups of rows in two dimensions; expected "
            "one, or Shard, which .redistribute() makes."
        )
    if fold is not None:  # no other cut is of its dimension
        shape = opened(fold, shape)
        splits = [(dim + (dim >= fold[0]), *cut) for dim, *cut in splits]
    index = index_map(shape, dim_coordinates(shape, splits), range(len(shape)))
    return replace(index, fold=fold), replica, num_replicas
