"""A rank's part of a parameter as a run of a matrix, and small factors laid out like that matrix.

The rows of the matrix are the slowest dimension of the part's memory, the columns all others:

    flat positions          0  1 | 2  3  4  5  6 | 7          num_columns = 5, offset = 3
    in the matrix     . . . x  x |
                                 | x  x  x  x  x |
                                                 | x . . . .
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from distprune.shards.geometry import IndexMap


class Block(NamedTuple):
    """A rectangle of the matrix whose elements lie side by side in a flat part.

    Attributes:
        start, stop: positions, from the beginning of the part that was cut into blocks.
        rows, columns: of the matrix.
    """

    start: int
    stop: int
    rows: slice
    columns: slice


@dataclass(frozen=True)
class MatrixRun:
    """Where the elements of a flat local part lie in a matrix.

    Attributes:
        num_columns: of the matrix, at least 1.
        offset: position of the first local element in the matrix, row by row.
        index: from flat positions to indices of the whole parameter.
    """

    num_columns: int
    offset: int
    index: IndexMap

    @classmethod
    def of(cls, index: IndexMap) -> MatrixRun:
        """The matrix of the flat view that an index map describes."""
        coordinates, strides = index.coordinates, index.strides
        num_columns = max(1, math.prod(len(column) for column in coordinates[1:]))
        if index.start is None or not coordinates:
            return cls(num_columns, index.offset, index)
        first = sum(rows.start * stride for rows, stride in zip(coordinates, strides, strict=True))
        return cls(num_columns, index.start - first, index)

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """The rectangles, at most three, that positions [start, stop) of the flat part cover."""
        num_columns = self.num_columns
        position, end = start + self.offset, stop + self.offset
        while position < end:
            row, column = divmod(position, num_columns)
            if column or end - position < num_columns:
                last = min(end, position - column + num_columns)
                rows = slice(row, row + 1)
                columns = slice(column, column + last - position)
            else:
                last = end - end % num_columns
                rows, columns = slice(row, last // num_columns), slice(0, num_columns)
            origin = start + self.offset
            yield Block(position - origin, last - origin, rows, columns)
            position = last

    def matrix_of(self, factor: Tensor, shape: Sequence[int]) -> Tensor:
        """A factor that broadcasts to the whole parameter, as it broadcasts to the matrix.

        Args:
            factor: of as many dimensions as the parameter; each of its size, or of size 1.
            shape: of the whole parameter.

        Returns:
            [rows or 1, columns or 1].
        """
        for dim, rows in zip(self.index.dims, self.index.coordinates, strict=True):
            if factor.shape[dim] != 1 and len(rows) != shape[dim]:
                factor = factor.narrow(dim, rows.start, len(rows))
        ordered = factor.permute(self.index.dims)
        if ordered.ndim == 0:
            return ordered.reshape(1, 1)
        if all(size == 1 for size in ordered.shape[1:]):
            return ordered.reshape(-1, 1)
        sizes = [len(column) for column in self.index.coordinates[1:]]
        return ordered.expand(ordered.shape[0], *sizes).flatten(1)
