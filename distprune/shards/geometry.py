"""Where a rank's part of a tensor is in the whole: pure functions on shapes and splits.

Uses neither process groups nor DTensor; the other modules of this room convert a wrapper's own
terms into the splits used here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distprune._common import memory


@dataclass(frozen=True)
class Split:
    """One cut of a tensor dimension into chunks, as torch.chunk makes them.

    Attributes:
        dim: the dimension.
        num_chunks: how many chunks there are.
        chunk: the number of this rank's chunk.
    """

    dim: int
    num_chunks: int
    chunk: int


def dim_coordinates(shape: Sequence[int], splits: Sequence[Split]) -> tuple[range, ...]:
    """Global coordinates, per tensor dimension, of the elements of one rank.

    Args:
        shape: the global shape.
        splits: in the order in which the tensor was cut.

    Returns:
        One range per dimension, as a chunk of a chunk is a run. The local element
        (i, j, ...) is the global element (result[0][i], result[1][j], ...).
    """
    coordinates = [range(size) for size in shape]
    for split in splits:
        whole = coordinates[split.dim]
        size = -(-len(whole) // split.num_chunks)
        coordinates[split.dim] = whole[split.chunk * size : (split.chunk + 1) * size]
    return tuple(coordinates)


@dataclass(frozen=True)
class IndexMap:
    """From positions in a flat local view to row-major indices in the global tensor.

    Attributes:
        coordinates: a range per dimension, slowest-varying dimension of the flat
            view first.
        strides: row-major stride of the same dimensions in the global tensor.
        start: first global index when the local elements are a contiguous run.
        offset: position of the first local element in the flat view that the
            coordinates describe: more than 0 if the local elements are a run of that view.
        dims: the dimensions of the global tensor, in the order of ``coordinates``.
    """

    coordinates: tuple[range, ...]
    strides: tuple[int, ...]
    start: int | None
    offset: int = 0
    dims: tuple[int, ...] = ()

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
        for coordinate, stride in dims[:1]:
            indices += rest.add_(coordinate.start).mul_(stride)
        return indices

    @property
    def is_ascending(self) -> bool:
        """Whether a later position always has a larger global index."""
        return self.start is not None or all(
            outer >= inner for outer, inner in itertools.pairwise(self.strides)
        )

    def position_of(self, index: int) -> int:
        """How many elements of the flat view have a smaller global index, if it is ascending.

        Returns:
            The position of the first element whose global index is not smaller. Below 0, or
            beyond the last local element, if all local elements have a larger, or smaller one.
        """
        if self.start is not None:
            return index - self.start
        position, num_inside = 0, math.prod(len(rows) for rows in self.coordinates)
        # Dimensions of equal stride may be in any order in memory: all but one have one element.
        for _, rows, stride in sorted(
            zip(self.dims, self.coordinates, self.strides, strict=True), key=lambda item: item[0]
        ):
            num_inside //= max(1, len(rows))
            coordinate, index = divmod(index, stride)
            position += min(max(coordinate - rows.start, 0), len(rows)) * num_inside
            if coordinate not in rows:
                break
        return position - self.offset


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
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = None
    # A run: rows follow each other in dimension 0, and everything below is whole.
    if list(memory_order) == list(range(len(shape))) and all(
        len(coordinates[dim]) == shape[dim] for dim in range(1, len(shape))
    ):
        start = coordinates[0].start * strides[0] if shape and coordinates[0] else 0
    return IndexMap(
        tuple(coordinates[dim] for dim in memory_order),
        tuple(strides[dim] for dim in memory_order),
        start,
        dims=tuple(memory_order),
    )


def run_index_map(shape: Sequence[int], stride: Sequence[int], first: int) -> IndexMap | None:
    """The :class:`IndexMap` of a run of a whole tensor's elements in the order of its memory.

    Args:
        shape: the global shape.
        stride: of the whole tensor.
        first: where in its memory the run begins.

    Returns:
        None if the whole tensor has gaps or overlaps.
    """
    order = memory_order(torch.empty_strided(tuple(shape), tuple(stride), device="meta"))
    if order is None:
        return None
    whole = index_map(shape, dim_coordinates(shape, ()), order)
    if whole.start is not None:
        return replace(whole, start=whole.start + first)
    return replace(whole, offset=first)


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
