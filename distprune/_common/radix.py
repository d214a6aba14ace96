"""The arithmetic of radix selection: an interval of keys shrinks around the key of a given rank.

     low                                            high
      |---|-------|-------|-------|--x----|-------|--|       bins of 2**shift keys
                                  |       |
                                 low     high                the next interval: the bin of the key

Callers count the keys of each bin, in memory, on disk or over many ranks; this module works on
histograms only. The edges of bins are multiples of 2**shift, so that the bin of a key is
``(key >> shift) - (low >> shift)``.

Source: Alabi et al., "Fast k-selection algorithms for graphics processing units", JEA 2012.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


class RankOutsideError(Exception):
    """A histogram has too few keys for the rank: counts of the same keys differ."""


@dataclass(frozen=True)
class Descent:
    """One state of the descent to a key.

    Attributes:
        low, high: a closed interval that holds the key.
        rank: how many keys of the interval come before it.
        bits: of a key that one step decides; 2**bits bins, or one more.
        shift: a bin of the next step holds 2**shift keys.
    """

    low: int
    high: int
    rank: int
    bits: int
    shift: int

    @classmethod
    def over(cls, low: int, high: int, rank: int, bits: int) -> Descent:
        """In an interval, with as many bins as ``bits`` allows."""
        return cls(low, high, rank, bits, max(0, (high - low).bit_length() - bits))

    @property
    def is_done(self) -> bool:
        """Whether the interval is a single key."""
        return self.low == self.high

    @property
    def num_bins(self) -> int:
        """Bins of the next histogram."""
        return (self.high >> self.shift) - (self.low >> self.shift) + 1

    def at(self, rank: int) -> Descent:
        """The same interval for the key of another rank."""
        return replace(self, rank=rank)

    def narrowed(self, histogram: np.ndarray) -> tuple[Descent, int]:
        """Step into the bin that holds the key.

        Args:
            histogram: int64 [num_bins], of the keys in the interval.

        Returns:
            The descent in that bin, and the number of the bin.

        Raises:
            RankOutsideError: the histogram holds no more than ``rank`` keys.
        """
        cumulative = np.cumsum(histogram)
        if not 0 <= self.rank < int(cumulative[-1]):
            raise RankOutsideError
        number = int(np.searchsorted(cumulative, self.rank, side="right"))
        num_below = int(cumulative[number - 1]) if number else 0
        return self.inside(number, self.rank - num_below), number

    def inside(self, number: int, rank: int) -> Descent:
        """The descent in a bin, to the key of a rank inside it."""
        start = ((self.low >> self.shift) + number) << self.shift
        low, high = max(self.low, start), min(self.high, start + (1 << self.shift) - 1)
        return Descent.over(low, high, rank, self.bits)
