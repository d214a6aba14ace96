"""Radix selection: intervals of keys shrink around the keys of given ranks, many side by side.

     low                                            high
      |---|-------|-------|-------|--x----|-------|--|       bins of 2**shift keys
                                  |       |
                                 low     high                the next interval: the bin of the key

The keys of each bin are counted, over all ranks. The edges of bins are multiples of 2**shift, so
that the bin of a key is ``(key >> shift) - (low >> shift)``.

Source: Alabi et al., "Fast k-selection algorithms for graphics processing units", JEA 2012.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.memory import Array
from distprune.ranks.collectives import Communicator

# Bits of a key that one histogram decides: 2049 counts are 16 KiB to sum over ranks.
_BITS = 11
# Keys that are binned at a time: the widened copy of them stays in the cache.
_CHUNK = 1 << 15

# Keys on one device, and the number of the interval that each of them belongs to, or all do.
OwnedKeys = tuple[int | Tensor, Tensor]


class ChangedError(RuntimeError):
    """The scores changed between two reads."""

    def __init__(self) -> None:
        super().__init__(
            "the counts of the scores disagree between two reads; expected scores that do not "
            "change during the call. Stop asynchronous updates, and make score functions pure."
        )


class Intervals(NamedTuple):
    """Closed intervals of keys; int64 [n] each.

    Attributes:
        low, high: the ends.
        rank: how many keys of the interval come before the wanted one, which lies in it.
        size: how many keys the interval holds.
    """

    low: Array
    high: Array
    rank: Array
    size: Array

    def at(self, rows: Array) -> Intervals:
        """Some of the intervals."""
        return Intervals(*(each[rows] for each in self))

    @property
    def shift(self) -> Array:
        """A bin of the next histogram holds 2**shift keys."""
        # Of keys of 64 bits, the difference fits into an unsigned number only.
        width = (self.high - self.low).view(np.uint64).astype(np.float64)
        shift: Array = np.maximum(0, np.frexp(width)[1].astype(np.int64) - _BITS)
        return shift

    @property
    def num_bins(self) -> int:
        """Bins of the next histogram, of the interval that has most."""
        return int(((self.high >> self.shift) - (self.low >> self.shift)).max()) + 1

    def histogram(self, keys: Iterable[OwnedKeys]) -> Array:
        """int64 [n, num_bins]: this rank's keys in the bins of every interval."""
        shift, num_bins = self.shift, self.num_bins
        # Added to key >> shift, it gives the place of the bin among those of all intervals.
        first = np.arange(len(shift)) * num_bins - (self.low >> shift)
        counts: Array = np.zeros(len(shift) * num_bins, dtype=np.int64)
        for owners, several in keys:
            if not memory.takes_numpy(several.device):
                table = torch.from_numpy(np.stack([self.low, self.high, shift, first]))
                low, high, shifts, firsts = table.to(several.device)[:, owners]
                wide = several.long()
                places = torch.where((wide >= low) & (wide <= high), (wide >> shifts) + firsts, -1)
                found = torch.bincount(places + 1, minlength=counts.size + 1)[1:]
                counts += found.cpu().numpy()
                continue
            for start in range(0, several.numel(), _CHUNK):
                some = several[start : start + _CHUNK].numpy()
                own: Any = owners
                if isinstance(owners, Tensor):
                    own = owners[start : start + _CHUNK].numpy()
                is_inside = (some >= self.low[own]) & (some <= self.high[own])
                if not is_inside.all():
                    some = some[is_inside]
                    own = own if isinstance(own, int) else own[is_inside]
                places = (some.astype(np.int64) >> shift[own]) + first[own]
                counts += np.bincount(places, minlength=counts.size)
        return counts.reshape(len(shift), num_bins)

    def narrowed(self, histogram: Array) -> Intervals:
        """Step into the bins that hold the wanted keys.

        Raises:
            ChangedError: a histogram does not hold as many keys as its interval.
        """
        upto, shift = histogram.cumsum(axis=1), self.shift
        if ((upto[:, -1] != self.size) | (self.rank >= self.size)).any():
            raise ChangedError
        rows = np.arange(len(shift))
        number = (upto <= self.rank[:, None]).sum(axis=1)
        size = histogram[rows, number]
        start = ((self.low >> shift) + number) << shift
        return Intervals(
            np.maximum(self.low, start),
            np.minimum(self.high, start + (1 << shift) - 1),
            self.rank - upto[rows, number] + size,
            size,
        )

    def descend(
        self,
        keys: Callable[[Intervals], Iterable[OwnedKeys]],
        ranks: Communicator,
        enough: Array | int = 0,
    ) -> Intervals:
        """Narrow every interval to one key, or to at most ``enough`` keys. Collective.

        Args:
            keys: a local step, called for each histogram: this rank's keys in these intervals.
            ranks: the ranks that have the keys.

        Cost: all-reduces of up to 16 KiB for each interval, one for 11 bits of its keys.
        """
        found = Intervals(*(each.copy() for each in self))
        while (rows := ((found.low < found.high) & (found.size > enough)).nonzero()[0]).size:

            def count(rows: Array = rows) -> Tensor:
                return torch.from_numpy(found.histogram(keys(found))[rows].reshape(-1))

            histogram = ranks.reduce(len(rows) * found.num_bins, count).numpy()
            narrowed = found.at(rows).narrowed(histogram.reshape(len(rows), -1))
            for whole, part in zip(found, narrowed, strict=True):
                whole[rows] = part
        return found
