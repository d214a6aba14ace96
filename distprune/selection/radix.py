"""Radix selection: an interval of keys shrinks around the key of a given rank.

     low                                            high
      |---|-------|-------|-------|--x----|-------|--|       bins of 2**shift keys
                                  |       |
                                 low     high                the next interval: the bin of the key

The keys of each bin are counted, in memory or over many ranks. The edges of bins are multiples of
2**shift, so that the bin of a key is ``(key >> shift) - (low >> shift)``.

Source: Alabi et al., "Fast k-selection algorithms for graphics processing units", JEA 2012.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from distprune.base import memory
from distprune.selection.kernels import histogram_on_device


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


T = TypeVar("T")

# A search yields local steps (see collectives.[Note: all or none]): the size of what a step
# returns, an int64 tensor, and the step. It is sent the sum over all ranks. What it does between
# them depends only on values that all ranks share.
Step = tuple[int, Callable[[], Tensor]]
Search = Generator[Step, Tensor, T]

# Bits of a key that one histogram decides: 2049 counts are 16 KiB to sum over ranks.
_BITS = 11
# Keys that are binned at a time: the widened copy of them stays in the cache.
_HISTOGRAM_CHUNK = 1 << 15


def descent_over(low: int, high: int, rank: int = 0) -> Descent:
    """The descent to the key of a rank among the keys in [low, high]."""
    return Descent.over(low, high, rank, _BITS)


def within(keys: Tensor, low: int, high: int) -> Tensor:
    """The keys that lie in [low, high], 1-d; on a device all keys, which are not copied there."""
    if keys.numel() == 0 or not memory.takes_numpy(keys.device):
        return keys
    raw = keys.numpy()
    if low <= int(raw.min()) and int(raw.max()) <= high:
        return keys
    return torch.from_numpy(raw[(raw >= low) & (raw <= high)])


def share_within(keys: Tensor, low: int, high: int) -> float:
    """Which fraction of the keys lies in [low, high]; 0.0 of none. Waits for a device."""
    if memory.takes_numpy(keys.device):
        number = within(keys, low, high).numel()
    else:
        number = int(torch.count_nonzero((keys >= low) & (keys <= high)))
    return number / max(1, keys.numel())


def binning(keys: Callable[[], Tensor], descent: Descent) -> Step:
    """The histogram of those keys that lie in the interval of a descent."""

    def count() -> Tensor:
        return histogram_of(within(keys(), descent.low, descent.high), descent)

    return descent.num_bins, count


def histogram_of(keys: Tensor, descent: Descent) -> Tensor:
    """int64 [descent.num_bins], on the CPU: counts of keys by bin.

    Args:
        keys: in the interval, if they are on the CPU; on a device others are left out.
    """
    if keys.numel() and not memory.takes_numpy(keys.device):
        return histogram_on_device(keys, descent.low, descent.high, descent.shift)
    counts = np.zeros(descent.num_bins, dtype=np.int64)
    first = descent.low >> descent.shift
    raw = keys.numpy()
    for start in range(0, raw.size, _HISTOGRAM_CHUNK):
        # Signed keys of a whole dtype would overflow when shifted down to zero.
        bins = (raw[start : start + _HISTOGRAM_CHUNK] >> descent.shift).astype(np.int64)
        bins -= first
        counts += np.bincount(bins, minlength=counts.size)
    return torch.from_numpy(counts)


def narrowed(descent: Descent, histogram: Tensor) -> tuple[Descent, int]:
    """Step into the bin that holds the rank; the descent there, and how many keys the bin holds.

    Raises:
        RuntimeError: the scores changed between two reads.
    """
    try:
        descent, number = descent.narrowed(histogram.numpy())
    except RankOutsideError:
        raise changed() from None
    return descent, int(histogram[number])


class ChangedError(RuntimeError):
    """The scores changed between two reads."""


def changed() -> ChangedError:
    """What to raise where counts of the same elements differ."""
    return ChangedError(
        "the counts of the scores disagree between two reads; expected scores that do not "
        "change during the call. Stop asynchronous updates, and make score functions pure."
    )
