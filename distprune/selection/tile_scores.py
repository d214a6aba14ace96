"""The scores of a part's tiles: sums over the elements that are not pruned; see ``tile_sums``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distprune._common import tile_sums
from distprune._common.memory import Array, Scratch
from distprune.selection.keys import Order
from distprune.selection.scores import ScoreSource
from distprune.selection.tile_places import Chunk, TilePlaces

# Bits of a significand, by dtype; of any other dtype 53.
_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
_EXACT = 1 << 53


@dataclass(frozen=True)
class TileReader:
    """Reads the scores of a part, tile by tile.

    Attributes:
        name: of the parameter, for messages.
        scores: of the flat part; None where what is ranked does not depend on them.
        live: flat mask in force; elements that are 1 count. None: all do.
        order: MAGNITUDE: the tiles' scores are sums of |score|.
        places: of the tiles.
    """

    name: str
    scores: ScoreSource | None
    live: Tensor | None
    order: Order
    places: TilePlaces

    @property
    def num_bits(self) -> int:
        """Bits that the significand of a score has, at most."""
        return 53 if self.scores is None else _BITS.get(self.scores.dtype, 53)

    def read_inner(self) -> tuple[Array, Array, int]:
        """The sums of the whole tiles, float64; which of them are live; and the number of NaN.

        NaN of loose tiles count too.

        Raises:
            ValueError: integer scores that float64 does not have.

        Cost: one read of the scores and of the mask; memory for a chunk, and 9 bytes per tile.
        """
        places, scratch = self.places, Scratch()
        sums = np.zeros(len(places.numbers), dtype=np.float64)
        live = np.ones(len(places.numbers), dtype=bool)
        num_nan = 0
        for chunk in places.chunks:
            scores, own = self._load(chunk, scratch)
            is_nan = np.isnan(scores)
            if is_nan.any():
                num_nan += int(np.count_nonzero(is_nan))
                continue
            count = places.num_inner(chunk)
            if not count:
                continue
            part = slice(chunk.first, chunk.first + count)
            inner = places.inner_of(chunk, scores)
            if self.scores is not None:
                sums[part] = tile_sums.sums_of_tiles(inner, places.sizes, self.num_bits).reshape(-1)
            if own is not None:
                alive = places.inner_of(chunk, own).astype(np.int64)
                live[part] = tile_sums.added(alive, places.sizes).reshape(-1) > 0
        return sums, live, num_nan

    def read_loose(self, numbers: Array) -> Iterator[tuple[Array, Array, Array]]:
        """Elements of some loose tiles, chunk by chunk: slots, scores and whether they are live.

        Args:
            numbers: of all tiles that are meant, ascending; a slot is a position among them.
        """
        scratch = Scratch()
        for chunk in self.places.chunks:
            if not chunk.has_loose:
                continue
            where, own = self.places.loose_in(chunk)
            scores, live = self._load(chunk, scratch)
            alive = np.ones(len(where), dtype=bool) if live is None else live[where]
            yield np.searchsorted(numbers, own), scores[where], alive

    def _load(self, chunk: Chunk, scratch: Scratch) -> tuple[Array, Array | None]:
        """The scores of a chunk, float64, 0 where they are pruned; and which are live."""
        start, stop = chunk.positions.start, chunk.positions.stop
        live = None
        if self.live is not None:
            live = (self.live[start:stop] == 1).cpu().numpy()
        if self.scores is None:
            return np.zeros(stop - start), live
        loaded = self.scores.load(start, stop, scratch).detach().cpu()
        scores: Array = loaded.double().numpy()
        if loaded.dtype is torch.float64:
            scores = scores.copy()
        if not loaded.dtype.is_floating_point and np.abs(scores).max(initial=0.0) >= _EXACT:
            raise ValueError(
                f"{self.name} has integer scores of 2**53 or more, which cannot be summed over "
                "tiles; expected smaller ones, or floating point."
            )
        if self.order is Order.MAGNITUDE:
            np.abs(scores, out=scores)
        if live is not None:
            scores[~live] = 0.0
        return scores, live


@dataclass(frozen=True)
class LooseSums:
    """Sums of loose tiles over all ranks, as limbs; see ``tile_sums``.

    A row of :meth:`take` has, per tile: the limbs, how many elements are live, and how many scores
    are inf and -inf.

    Attributes:
        reader: of this rank's part.
        numbers: of the tiles, ascending; the same on all ranks.
    """

    reader: TileReader
    numbers: Array

    def extent(self) -> tuple[int, int]:
        """The exponent above all finite scores, and that of their lowest bit; 0, 0 of zeros."""
        top, smallest = 0.0, np.inf
        for _, scores, _ in self.reader.read_loose(self.numbers):
            magnitudes = np.abs(scores[np.isfinite(scores) & (scores != 0)])
            if magnitudes.size:
                top = max(top, float(magnitudes.max()))
                smallest = min(smallest, float(magnitudes.min()))
        if not top:
            return _NO_EXTENT
        return int(np.frexp(top)[1]), tile_sums.lowest_bit(smallest, self.reader.num_bits)

    def take(self, exponent: int, num_limbs: int) -> Array:
        """int64 [num_limbs + 3, tiles]: this rank's share of all sums."""
        count = len(self.numbers)
        rows = np.zeros((num_limbs + 3, count), dtype=np.int64)
        for slots, scores, live in self.reader.read_loose(self.numbers):
            rows[-3] += np.bincount(slots[live], minlength=count)
            infinite = np.isinf(scores)
            if infinite.any():
                rows[-2] += np.bincount(slots[scores == np.inf], minlength=count)
                rows[-1] += np.bincount(slots[scores == -np.inf], minlength=count)
                scores = np.where(infinite, 0.0, scores)
            for number in range(num_limbs):
                limb, scores = tile_sums.cut_limb(scores, exponent, number)
                # Sums of limbs of a chunk are below 2**53, and so exact, unless a chunk is huge.
                for first in range(0, len(slots), _PIECE):
                    part = slice(first, first + _PIECE)
                    counts = np.bincount(slots[part], limb[part], minlength=count)
                    rows[number] += counts.astype(np.int64)
        return rows


_PIECE = 1 << 18
# Of no score but zeros: smaller than any exponent, and larger than any lowest bit.
_NO_EXTENT = (-2000, 2000)


def sums_and_live(rows: Array, exponent: int) -> tuple[Array, Array]:
    """The sums of loose tiles, float64, and which of them are live, from the rows of all ranks."""
    sums = tile_sums.rounded(list(rows[:-3]), exponent)
    with np.errstate(invalid="ignore"):
        sums += np.where(rows[-2] > 0, np.inf, 0.0)
        sums -= np.where(rows[-1] > 0, np.inf, 0.0)
    return sums, rows[-3] > 0
