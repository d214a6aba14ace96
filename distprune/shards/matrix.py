"""A rank's part of a parameter as a run of matrices, and small factors laid out like these.

There is one matrix. Its rows are the slowest dimension of the part's memory, its columns all
others:

    flat positions          0  1 | 2  3  4  5  6 | 7          num_columns = 5, offset = 3
    in the matrix     . . . x  x |
                                 | x  x  x  x  x |
                                                 | x . . . .

Of three dimensions, [experts, out, in] for example, there may be a matrix for each index of the
slowest one: then a factor [experts, 1, in] stays as small as it is.
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
        matrix: its number.
        rows, columns: of the matrix.
    """

    start: int
    stop: int
    matrix: int
    rows: slice
    columns: slice


@dataclass(frozen=True)
class MatrixRun:
    """Where the elements of a flat local part lie in a matrix, or in one after the other.

    Attributes:
        num_rows: of a matrix, at least 1.
        num_columns: of a matrix, at least 1.
        num_row_dims: how many dimensions of memory are rows, or matrices and rows: 1 or 2.
        offset: position of the first local element in the matrices, row by row.
        index: from flat positions to indices of the whole parameter.
    """

    num_rows: int
    num_columns: int
    num_row_dims: int
    offset: int
    index: IndexMap

    @classmethod
    def of(cls, index: IndexMap, factors: Sequence[Tensor] = ()) -> MatrixRun:
        """The matrices of the flat view that an index map describes.

        Args:
            index: of a local part.
            factors: that broadcast to the whole parameter: there are several matrices if one of
                them would be as large as the part otherwise.
        """
        coordinates, strides = index.coordinates, index.strides
        sizes = [len(rows) for rows in coordinates]
        ordered = [[factor.shape[dim] for dim in index.dims] for factor in factors]
        num_row_dims = 2 if any(_is_of_matrices(factor, sizes) for factor in ordered) else 1
        num_rows = max(1, math.prod(sizes[num_row_dims - 1 : num_row_dims]))
        num_columns = max(1, math.prod(sizes[num_row_dims:]))
        offset = index.offset
        if index.start is not None and coordinates:
            pairs = zip(coordinates, strides, strict=True)
            offset = index.start - sum(rows.start * stride for rows, stride in pairs)
        return cls(num_rows, num_columns, num_row_dims, offset, index)

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """The rectangles, at most three of a matrix, that positions [start, stop) cover."""
        num_columns, size = self.num_columns, self.num_rows * self.num_columns
        origin = start + self.offset
        position, end = origin, stop + self.offset
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
            yield Block(first, first + length, matrix, rows, columns)
            position += length

    def places(self, positions: Tensor) -> tuple[Tensor | int, Tensor, Tensor]:
        """The matrix, the row and the column of flat positions."""
        positions = positions + self.offset
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
        for dim, rows in zip(self.index.dims, self.index.coordinates, strict=True):
            if factor.shape[dim] != 1 and len(rows) != shape[dim]:
                factor = factor.narrow(dim, rows.start, len(rows))
        ordered = factor.permute(self.index.dims)
        if ordered.ndim == 0:
            return ordered.reshape(1, 1, 1)
        if self.num_row_dims == 2:
            return ordered
        if all(size == 1 for size in ordered.shape[1:]):
            return ordered.reshape(1, -1, 1)
        sizes = [len(column) for column in self.index.coordinates[1:]]
        return ordered.expand(ordered.shape[0], *sizes).flatten(1).unsqueeze(0)


def _is_of_matrices(factor: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a factor is as large as the part in one matrix, and much smaller in several."""
    if len(sizes) != 3 or min(sizes[1:]) < 2:
        return False
    return (factor[0] > 1 or sizes[0] == 1) and (factor[1] > 1) != (factor[2] > 1)
