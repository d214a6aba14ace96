"""The tiles of a tensor: where they lie in its row-major order, and their sums.

A tensor is a sequence of bands of whole tiles. With kernel 1, height 2 and width 3, a band is::

    a a a b b b c c c        elements of the same letter are one tile; the tiles a, b, c are
    a a a b b b c c c        numbers 0, 1, 2 of the band

So tiles are in the row-major order of their grid, as in ``selection.tile_places``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distprune._common.blocks import Layout
from distprune._common.memory import Array, Runs, Scratch
from distprune._common.tile_sums import added, sums_of_tiles
from distprune.selection.scores import ScoreSource

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
    def of(cls, layout: Layout, tile: tuple[int, int]) -> Bands:
        """The bands of a tensor that the tiles fit."""
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
        """The sums of tiles' |scores|, float64; NaN of tiles with a NaN.

        Args:
            values: float64, of whole bands, or of whole tiles of one band of this height.
            num_bits: of the significand of a score.

        Memory: about 40 bytes for each element.
        """
        values = np.abs(values).reshape(-1, self.height, self.length, self.kernel)
        sizes = (1, self.height, self.width, 1)
        is_nan = np.isnan(values)
        if is_nan.any():
            values[is_nan] = 0.0
            sums = sums_of_tiles(values, sizes, num_bits)
            sums[added(is_nan.astype(np.int64), sizes) > 0] = np.nan
        else:
            sums = sums_of_tiles(values, sizes, num_bits)
        flat: Array = np.ascontiguousarray(sums).reshape(-1)
        return flat

    def strip(self, num_columns: int) -> Bands:
        """Bands of ``num_columns`` columns of tiles."""
        return Bands(self.height, num_columns * self.width, self.width, self.kernel)

    def split(self, first: int, last: int, most: int) -> Iterator[tuple[int, int]]:
        """Cut tiles [first, last) into whole bands, or into columns of tiles of one band.

        Args:
            first, last: tiles; columns of tiles are not cut.
            most: elements of a piece, unless one column of tiles has more.
        """
        own = self.num_tiles
        while first < last:
            inside = first % own
            num_bands = 0 if inside else (last - first) // own
            if num_bands and self.size <= most:
                stop = first + min(num_bands, most // self.size) * own
            else:
                num_columns = max(1, most // (self.tile_size * self.kernel))
                stop = min(first + num_columns * self.kernel, first - inside + own, last)
            yield first, stop
            first = stop

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
        self._num_bits = 1 - int(math.log2(torch.finfo(scores.dtype).eps))

    def load(self, start: int, stop: int, scratch: Scratch | None = None) -> Tensor:
        """The sums of the tiles [start, stop), about a chunk of elements at a time."""
        kernel = self._bands.kernel  # columns of tiles are not cut
        first, last = start // kernel * kernel, -(-stop // kernel) * kernel
        pieces = [self._sums(*piece) for piece in self._bands.split(first, last, _SUMMED)]
        sums = np.concatenate(pieces)
        return torch.from_numpy(sums[start - first : stop - first])

    def gather(self, runs: Runs) -> Tensor:
        starts = (runs.start + runs.numbers * runs.length).tolist()
        return torch.cat([self.load(start, start + runs.length) for start in starts])

    def _sums(self, first: int, last: int) -> Array:
        """The sums of tiles that :meth:`Bands.split` yields."""
        bands = self._bands
        number, inside = divmod(first, bands.num_tiles)
        num_bands, rest = divmod(last - first, bands.num_tiles)
        start = number * bands.size
        if not inside and not rest:
            values = self._scores.load(start, start + num_bands * bands.size)
            return bands.sums(values.double().numpy(), self._num_bits)
        strip = bands.strip((last - first) // bands.kernel)
        start += inside // bands.kernel * bands.width * bands.kernel
        rows = [
            self._scores.load(row, row + strip.row_size).double()
            for row in range(start, start + bands.size, bands.row_size)
        ]
        return strip.sums(torch.cat(rows).numpy(), self._num_bits)
