"""The tiles of a tensor: where they lie in its row-major order, and the keys of their sums.

A tensor is a sequence of bands of whole tiles. With kernel 1, height 2 and width 3, a band is::

    a a a b b b c c c        elements of the same letter are one tile; the tiles a, b, c are
    a a a b b b c c c        numbers 0, 1, 2 of the band

So tiles are in the row-major order of their grid, as in ``selection.tile_places``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from distprune._common.element_groups import Layout
from distprune._common.float_formats import magnitude_mask
from distprune._common.tile_sums import added, sums_of_tiles
from distprune.files.ranking.keys import Array, KeyFormat
from distprune.files.ranking.scales import magnitudes

SUMS = KeyFormat(64, "F64")  # of the keys of tiles

# Bits of a significand, by format.
_SIGNIFICANDS = {"BF16": 8, "F16": 11, "F32": 24, "F64": 53}


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

    def keys(self, bits: Array, dtype: str) -> Array:
        """The keys of the sums of tiles' scores; those of tiles with a NaN are above inf.

        Args:
            bits: the scores of whole bands, or of whole tiles of one band of this height.
            dtype: of the scores.

        Memory: about 40 bytes for each element.
        """
        values = magnitudes(bits, dtype).astype(np.float64, copy=False)
        values = values.reshape(-1, self.height, self.length, self.kernel)
        sizes = (1, self.height, self.width, 1)
        is_nan = np.isnan(values)
        if is_nan.any():
            values[is_nan] = 0.0
            sums = sums_of_tiles(values, sizes, _SIGNIFICANDS[dtype])
            sums[added(is_nan.astype(np.int64), sizes) > 0] = np.nan
        else:
            sums = sums_of_tiles(values, sizes, _SIGNIFICANDS[dtype])
        bits_of_sums = np.ascontiguousarray(sums).reshape(-1).view(np.uint64)
        keys: Array = bits_of_sums & np.uint64(magnitude_mask(64))
        return keys

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

    def collapse(self, flags: Array) -> tuple[Array, int]:
        """Which tiles of whole bands have a flag that is True, and how many have others, too.

        Args:
            flags: bool, 1-d, of the elements of whole bands.
        """
        rows = flags.reshape(-1, self.height, self.length, self.kernel)
        has_any, has_all = rows[:, 0].copy(), rows[:, 0].copy()
        for number in range(1, self.height):
            has_any |= rows[:, number]
            has_all &= rows[:, number]
        shape = (-1, self.length // self.width, self.width, self.kernel)
        columns, whole = has_any.reshape(shape), has_all.reshape(shape)
        tiles, is_whole = columns[:, :, 0].copy(), whole[:, :, 0].copy()
        for number in range(1, self.width):
            tiles |= columns[:, :, number]
            is_whole &= whole[:, :, number]
        return tiles.reshape(-1), int(np.count_nonzero(tiles & ~is_whole))
