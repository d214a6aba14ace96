"""Where a search for the k-th key looks first: around the key that the last search found.

A call that is repeated every few steps needs no sample: its k-th key has moved little. The interval
around the old key is collected at once, and the counts at its two ends show whether it holds the
new one:

    last call        |------[---T---]------------|
    this call        |------[------T]------------|     T moved, and is still inside: one scan
    next call        |---------[---T---]---------|     around T; wider if it has moved far

If it does not, the search goes on between the ends with a sample, as any other. So a start decides
how fast a search is, and never what it finds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distprune.selection.candidates import Candidates, Interval
from distprune.selection.keys import KeyRange
from distprune.selection.radix import within
from distprune.selection.sampling import sample

# Which fraction of all elements the interval is to hold; and the most, after large moves.
_SHARE, _LARGEST_SHARE = 0.005, 0.03
# A key with more than this fraction of all elements is counted, not collected.
_HEAVY = 0.01
# Elements that a rank samples to see whether the interval still holds as few as it did.
_SAMPLE = 4096


@dataclass(frozen=True)
class Start:
    """The outcome of a search, for the next one of the same kind; the same on all ranks.

    Attributes:
        keys: the range of the keys; a search in another range takes no notice of the start.
        threshold: the k-th key.
        density: elements per key around it; None if its neighbours were not collected.
        half: keys to collect on either side of it; None: it is only counted.
        total: elements that competed.
    """

    keys: KeyRange
    threshold: int
    density: float | None
    half: int | None
    total: int

    @property
    def share(self) -> float:
        """About which fraction of the elements lies in the interval."""
        if self.half is None or self.density is None:
            return 0.0
        return min(1.0, self.density * (2 * self.half + 1) / max(1, self.total))

    def interval_in(self, low: int, high: int) -> Interval | None:
        """The keys of [low, high] to collect, if any."""
        if self.half is None:
            return None
        first, last = max(low, self.threshold - self.half), min(high, self.threshold + self.half)
        return (first, last) if first <= last else None

    def is_crowded(self, parts: Sequence[Candidates], interval: Interval) -> bool:
        """Whether this rank would collect many more elements than expected.

        Cost: a few thousand elements are read.
        """
        num_counted = sum(len(part.counted) for part in parts)
        if not num_counted:
            return False
        rate = min(1.0, _SAMPLE / num_counted)
        drawn = sample(parts, rate, self.keys.high + 1, np.random.default_rng(0))
        share = within(drawn, *interval).numel() / max(1, drawn.numel())
        return share > max(2 * _LARGEST_SHARE, 4 * self.share)


def next_start(
    keys: KeyRange,
    threshold: int,
    num_ties: int,
    total: int,
    density: float | None,
    previous: Start | None,
) -> Start:
    """Where the next search looks first.

    Args:
        keys: the range of the keys.
        threshold: the k-th key.
        num_ties: elements that have it.
        total: elements that competed.
        density: elements per key around it, if that is known.
        previous: where this search began.
    """
    if density is None and previous is not None and previous.keys == keys:
        density = previous.density
    if density is None or density <= 0 or num_ties > _HEAVY * total:
        return Start(keys, threshold, density, None, total)
    half = math.ceil(_SHARE * total / density / 2)
    if previous is not None and previous.keys == keys:
        moved = 2 * abs(threshold - previous.threshold)
        half = max(half, min(moved, math.ceil(_LARGEST_SHARE * total / density / 2)))
    return Start(keys, threshold, density, half, total)
