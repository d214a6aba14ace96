"""The tiles of a tensor: where they lie in its row-major order, and their sums.

A tensor is a sequence of bands of whole tiles. With kernel 1, height 2 and width 3, a band is::

    a a a b b b c c c        elements of the same letter are one tile; the tiles a, b, c are
    a a a b b b c c c        numbers 0, 1, 2 of the band

So tiles are in the row-major order of their grid, as in ``selection.tiles``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distprune._common.blocks import Layout
from distprune._common.memory import Array, Runs, Scratch, boxes_of_run
from distprune.selection.scores import ScoreSource
from distprune.selection.tile_sums import added, num_bits_of, sums_of_tiles

_SUMMED = 1 << 16  # elements whose tiles are summed at a time: they stay in the cache


@dataclass(frozen=True)
class Bands:
    """The tiles of a tensor, as a sequence of bands [height, length, kernel].

    Attributes:
        height: rows of a band, which is the height of its tiles.
        length: of a row, in elements or, with a kernel, in runs of these.
        width: of a tile, likewise.
        kernel: a tile has one element of each run.
    """

    height: int
    length: int
    width: int
    kernel: int

    @classmethod
    def of(cls, layout: Layout | None, tile: tuple[int, int]) -> Bands:
        """The bands of a tensor that the tiles fit."""
        assert layout is not None  # it is known where tiles go along the inputs
        outputs, inputs = tile
        if layout.columns > 1:
            return cls(inputs, layout.columns, outputs, layout.kernel)
        return cls(outputs, layout.inputs, inputs, layout.kernel)

    @property
    def tile_size(self) -> int:
        """Elements of a tile."""
        return self.height * self.width

    @property
    def row_size(self) -> int:
        """Elements of a row."""
        return self.length * self.kernel

    @property
    def size(self) -> int:
        """Elements of a band."""
        return self.height * self.row_size

    @property
    def num_tiles(self) -> int:
        """Tiles of a band."""
        return self.length // self.width * self.kernel

    def sums(self, values: Array, num_bits: int) -> Array:
        """The sums of tiles' |scores|, float64, 1-d; NaN of tiles with a NaN.

        Args:
            values: float64 [bands, height, columns of tiles * width, kernel].
            num_bits: of the significand of a score.

        Memory: about 40 bytes for each element.
        """
        values, sizes = np.abs(values), (1, self.height, self.width, 1)
        is_nan = np.isnan(values)
        if not is_nan.any():
            return sums_of_tiles(values, sizes, num_bits).reshape(-1)
        values[is_nan] = 0.0
        sums = sums_of_tiles(values, sizes, num_bits)
        sums[added(is_nan.astype(np.int64), sizes) > 0] = np.nan
        return sums.reshape(-1)

    def spread(self, flags: Array, first: int, most: int) -> Iterator[tuple[int, Array]]:
        """Flags of the elements of whole bands, from flags of their tiles.

        Args:
            flags: bool, 1-d, of the tiles of whole bands.
            first: index of the first element.
            most: elements of a piece, unless one row has more.

        Yields:
            Index of the first element, and bool, 1-d: rows, in their order.
        """
        grid = flags.reshape(-1, self.num_tiles // self.kernel, self.kernel)
        num_rows = len(grid) * self.height
        step = max(1, most // self.row_size)
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            bands = range(start // self.height, -(-stop // self.height))
            rows = grid[bands.start : bands.stop].repeat(self.width, axis=1)
            rows = rows.repeat(self.height, axis=0)
            offset = bands.start * self.height
            yield (
                first + start * self.row_size,
                rows[start - offset : stop - offset].reshape(-1),
            )


class TileScores:
    """The sums of the scores of a tensor's tiles: see ``selection.scores.ScoreSource``.

    Args:
        scores: of the elements.
        bands: of the tensor.
    """

    is_in_memory = False
    tally = None
    dtype = torch.float64

    def __init__(self, scores: ScoreSource, bands: Bands) -> None:
        self.is_thread_safe = scores.is_thread_safe
        self._scores = scores
        self._bands = bands
        self._num_bits = num_bits_of(scores.dtype)

    def load(self, start: int, stop: int, scratch: Scratch | None = None) -> Tensor:
        """The sums of the tiles [start, stop), about a chunk of elements at a time."""
        bands = self._bands
        grid = (stop, bands.length // bands.width, bands.kernel)
        sums = [
            self._sums(*piece)
            for box in boxes_of_run(grid, start, stop)
            for piece in _cut(bands, *box)
        ]
        return torch.from_numpy(np.concatenate(sums))

    def gather(self, runs: Runs) -> Tensor:
        starts = (runs.start + runs.numbers * runs.length).tolist()
        return torch.cat([self.load(start, start + runs.length) for start in starts])

    def _sums(self, rows: range, columns: range, kernel: range) -> Array:
        """The sums of a box of the grid [bands, columns, kernel]."""
        bands = self._bands
        lines = range(rows.start * bands.height, rows.stop * bands.height)
        step = bands.width * bands.kernel
        first, last = columns.start * step, columns.stop * step
        if last - first == bands.row_size:  # whole lines are one run
            last = len(lines) * bands.row_size
            lines = lines[:1]
        starts = [line * bands.row_size for line in lines]
        loaded = [self._scores.load(start + first, start + last).double() for start in starts]
        values = torch.cat(loaded).view(len(rows), bands.height, -1, bands.kernel)
        return bands.sums(values[..., kernel.start : kernel.stop].numpy(), self._num_bits)


def _cut(bands: Bands, rows: range, columns: range, kernel: range) -> Iterator[tuple[range, ...]]:
    """Boxes of a few bands, or of a few columns of one band, from a box of the grid."""
    num_columns = max(1, _SUMMED // (bands.tile_size * bands.kernel))
    num_rows = max(1, num_columns // len(columns))
    for row in range(rows.start, rows.stop, num_rows):
        for column in range(columns.start, columns.stop, num_columns):
            yield (
                range(row, min(row + num_rows, rows.stop)),
                range(column, min(column + num_columns, columns.stop)),
                kernel,
            )
