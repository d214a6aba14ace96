"""Radix selection: histograms of keys in an interval, and the step into the bin that holds a rank.

Source: Alabi et al., "Fast k-selection algorithms for graphics processing units", JEA 2012.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")

# A search yields local steps (see collectives.[Note: all or none]): the size of what a step
# returns, an int64 tensor, and the step. It is sent the sum over all ranks. What it does between
# them depends only on values that all ranks share.
Step = tuple[int, Callable[[], Tensor]]
Search = Generator[Step, Tensor, T]

_BINS_LOG2 = 11
# One more than a power of two: an interval need not start at a bin's edge.
BINS = (1 << _BINS_LOG2) + 1
# Keys that are binned at a time: the widened copy of them stays in the cache.
_HISTOGRAM_CHUNK = 1 << 15


def within(keys: Tensor, low: int, high: int) -> Tensor:
    """The keys that lie in [low, high], 1-d, on the CPU."""
    if keys.numel() == 0:
        return keys
    raw = keys.numpy()
    if low <= int(raw.min()) and int(raw.max()) <= high:
        return keys
    return torch.from_numpy(raw[(raw >= low) & (raw <= high)])


def binning(keys: Callable[[], Tensor], low: int, high: int) -> Callable[[], Tensor]:
    """A local step: the histogram of the keys in [low, high]."""
    return lambda: histogram_of(within(keys(), low, high), low, high)


def histogram_of(keys: Tensor, low: int, high: int) -> Tensor:
    """int64 [2049] counts of keys that all lie in [low, high]."""
    counts = np.zeros(BINS, dtype=np.int64)
    shift = _bin_shift(low, high)
    raw = keys.numpy()
    for start in range(0, raw.size, _HISTOGRAM_CHUNK):
        # Signed keys of a whole dtype would overflow when shifted down to zero.
        bins = (raw[start : start + _HISTOGRAM_CHUNK] >> shift).astype(np.int64)
        bins -= low >> shift
        counts += np.bincount(bins, minlength=BINS)
    return torch.from_numpy(counts)


def descend(histogram: Tensor, rank: int, low: int, high: int) -> tuple[int, int, int, int]:
    """Step into the bin that holds a rank: its keys, the rank inside it, its count."""
    cumulative = histogram.cumsum(0)
    if not 0 <= rank < int(cumulative[-1]):
        raise changed()
    which = int(torch.searchsorted(cumulative, rank, right=True))
    shift = _bin_shift(low, high)
    start = ((low >> shift) + which) << shift
    before = int(cumulative[which - 1]) if which else 0
    return (
        max(low, start),
        min(high, start + (1 << shift) - 1),
        rank - before,
        int(histogram[which]),
    )


def changed() -> RuntimeError:
    """What to raise where counts of the same elements differ."""
    return RuntimeError(
        "the counts of the scores disagree between two reads; expected scores that do not "
        "change during the call. Stop asynchronous updates, and make score functions pure."
    )


def _bin_shift(low: int, high: int) -> int:
    return max(0, (high - low).bit_length() - _BINS_LOG2)
