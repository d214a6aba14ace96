"""Radix selection: an interval of keys shrinks around the key of a given rank.

     low                                            high
      |---|-------|-------|-------|--x----|-------|--|       bins of 2**shift keys
                                  |       |
                                 low     high                the next interval: the bin of the key

The keys of each bin are counted, over all ranks. The edges of bins are multiples of 2**shift, so
that the bin of a key is ``(key >> shift) - (low >> shift)``.

Source: Alabi et al., "Fast k-selection algorithms for graphics processing units", JEA 2012.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.memory import Array

# Bits of a key that one histogram decides: 2049 counts are 16 KiB to sum over ranks.
BITS = 11
# Keys that are binned at a time: the widened copy of them stays in the cache.
_CHUNK = 1 << 15


class ChangedError(RuntimeError):
    """The scores changed between two reads."""

    def __init__(self) -> None:
        super().__init__(
            "the counts of the scores disagree between two reads; expected scores that do not "
            "change during the call. Stop asynchronous updates, and make score functions pure."
        )


@dataclass(frozen=True)
class Descent:
    """One state of the descent to a key.

    Attributes:
        low, high: a closed interval that holds the key.
        rank: how many keys of the interval come before it.
        count: how many keys the interval holds; -1 if that is not known.
    """

    low: int
    high: int
    rank: int
    count: int = -1

    @property
    def shift(self) -> int:
        """A bin of the next step holds 2**shift keys."""
        return max(0, (self.high - self.low).bit_length() - BITS)

    @property
    def num_bins(self) -> int:
        """Bins of the next histogram."""
        return (self.high >> self.shift) - (self.low >> self.shift) + 1

    def narrowed(self, histogram: Array) -> Descent:
        """Step into the bin that holds the key.

        Raises:
            ChangedError: the histogram holds no more than ``rank`` keys.
        """
        upto = np.cumsum(histogram)
        if not 0 <= self.rank < int(upto[-1]):
            raise ChangedError
        number = int(np.searchsorted(upto, self.rank, side="right"))
        count = int(histogram[number])
        start = ((self.low >> self.shift) + number) << self.shift
        low, high = max(self.low, start), min(self.high, start + (1 << self.shift) - 1)
        return Descent(low, high, self.rank - int(upto[number]) + count, count)

    def histogram(self, keys: Iterable[Tensor]) -> Array:
        """int64 [num_bins]: those of the keys that lie in the interval, by bin."""
        shift, first = self.shift, self.low >> self.shift
        counts: Array = np.zeros(self.num_bins, dtype=np.int64)
        on_device: Tensor | None = None
        for several in keys:
            if not memory.takes_numpy(several.device):
                inside = several[(several >= self.low) & (several <= self.high)]
                bins = (inside >> shift).long() - first
                own = torch.bincount(bins, minlength=counts.size)
                on_device = own if on_device is None else on_device + own.to(on_device.device)
                continue
            raw = several.numpy()
            for start in range(0, raw.size, _CHUNK):
                some = raw[start : start + _CHUNK]
                if int(some.min()) < self.low or int(some.max()) > self.high:
                    some = some[(some >= self.low) & (some <= self.high)]
                # Signed keys of a whole dtype would overflow when shifted down to zero.
                places = (some >> shift).astype(np.int64)
                places -= first
                counts += np.bincount(places, minlength=counts.size)
        return counts if on_device is None else counts + on_device.cpu().numpy()
