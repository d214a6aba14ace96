"""Where a search for the k-th key looks: around a sample's, or around the key of the last search.

A call that is repeated every few steps needs no sample: its k-th key has moved little. The interval
around the old key is collected at once, and the counts at its two ends show whether it holds the
new one:

    last call        |------[---T---]------------|
    this call        |------[------T]------------|     T moved, and is still inside: one scan
    next call        |---------[---T---]---------|     around T; wider if it has moved far

If it does not, the search goes on between the ends with a sample, as any other. So a start decides
how fast a search is, and never what it finds.

Source: Floyd and Rivest, "Expected time bounds for selection", CACM 1975.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distprune._common.memory import Runs, join
from distprune.selection.candidates import Candidates, Draw, Interval
from distprune.selection.kernels import fused_for, kernels_on
from distprune.selection.keys import KeyRange
from distprune.selection.radix import Descent, Search, binning, descent_over, narrowed, share_within
from distprune.selection.small import batches_of

# A bracket this many standard deviations wide misses about once in a million.
_SIGMAS = 5.0
# Up to so many elements in all are collected outright: a sample would not pay.
COLLECT_ALL = 1 << 16
# A key with more than this fraction of the sample, or of all elements, is counted, not collected.
_HEAVY = 0.01
# Neighbours that are sampled together, as a cache line brings them anyway; one by one from
# parameters of fewer elements than the second number.
_RUN, _SMALL = 16, 4096
# Which fraction of all elements the interval of a start is to hold; and the most, after large
# moves.
_SHARE, _LARGEST_SHARE = 0.005, 0.03
# Elements that a rank samples to see whether that interval still holds as few as it did.
_FEW = 4096


@dataclass
class _Sample:
    """Keys that a local step drew and later steps count: 1-d."""

    keys: Tensor


@dataclass(frozen=True)
class Around:
    """What to count and collect around the k-th key.

    Attributes:
        pivots: keys to count up to.
        interval: of keys to collect, if any.
        sample: the sample that suggested the interval, if one did ...
        start: ... or the earlier search that did.
        share: about which fraction of the elements of all ranks lies in the interval.
    """

    pivots: set[int]
    interval: Interval | None
    sample: _Sample | None = None
    share: float = 1.0
    start: Start | None = None

    def most_of(self, total: int) -> float:
        """How many of so many elements lie in the interval, about; the same on all ranks."""
        return 0.0 if self.interval is None else self.share * total

    def expected_share(self) -> float:
        """About which fraction of this rank's elements lies in the interval."""
        if self.interval is None:
            return 0.0
        if self.sample is None:
            return self.share
        return share_within(self.sample.keys, *self.interval)

    def is_crowded(self, parts: Sequence[Candidates]) -> bool:
        """Whether this rank would collect many more elements than the start says.

        Cost: a few thousand elements are read, if there is a start.
        """
        num_counted = sum(len(part.counted) for part in parts)
        if self.start is None or self.interval is None or not num_counted:
            return False
        rate = min(1.0, _FEW / num_counted)
        drawn = sample(parts, rate, self.start.keys.high + 1, np.random.default_rng(0))
        share = share_within(drawn, *self.interval)
        return share > max(2 * _LARGEST_SHARE, 4 * self.share)


def bracket(
    parts: Sequence[Candidates],
    k: int,
    num_inside: int,
    low: int,
    high: int,
    *,
    highest: int,
    num_rounds: int,
    generator: np.random.Generator,
) -> Search[Around]:
    """Pivots around the k-th of the ``num_inside`` keys in [low, high], and what to collect.

         low            first  k-th  last             high
          |--------------[------x-----]----------------|
               counted      collected       counted

    Both are the same on every rank, because they depend on summed histograms only.

    Args:
        highest: the largest key of all; one more stands for elements that do not compete.
        num_rounds: how many brackets have missed so far; each doubles the sample.
        generator: of the positions to sample.
    """
    total = sum(part.numel for part in parts)
    rate = min(1.0, sample_size(total) * 2**num_rounds / total)
    drawn = _Sample(torch.empty(0, dtype=torch.int64))

    def draw() -> Tensor:
        drawn.keys = sample(parts, rate, highest + 1, generator)
        return drawn.keys

    descent = descent_over(low, high)
    histogram = yield binning(draw, descent)
    size = int(histogram.sum())
    if size == 0:
        return Around(_eight_pivots(low, high), None)
    centre = k / num_inside * size
    margin = margin_of(centre, size)
    pivots: set[int] = set()
    first, last = low, high  # the interval to collect
    num_edges = 0  # of the sample, keys at the edges of the interval
    for rank, is_lower in ((centre - margin, True), (centre + margin, False)):
        rank = math.floor(rank) if is_lower else math.ceil(rank)
        if not 0 <= rank < size:
            continue
        edge, count = yield from _order_statistic(drawn, histogram, descent.at(rank), margin / 5)
        # A key with much of the sample is counted, not collected.
        is_heavy = edge[0] == edge[1] and count > max(_HEAVY * size, margin / 5)
        num_edges += 0 if is_heavy else count
        if is_lower:
            pivots.add(edge[0] - 1)
            first = edge[0]
            if is_heavy:
                pivots.add(edge[1])
                first = edge[1] + 1
        else:
            pivots.add(edge[1])
            last = edge[1]
            if is_heavy:
                pivots.add(edge[0] - 1)
                last = edge[0] - 1
    pivots = {pivot for pivot in pivots if low <= pivot < high}
    if not pivots and num_inside > max(COLLECT_ALL, total // 50):
        return Around(_eight_pivots(low, high), None)
    if first > last:
        return Around(pivots, None)
    share = min(size, 2 * margin + num_edges) / size * num_inside / total
    return Around(pivots, (first, last), drawn, share)


def _order_statistic(
    drawn: _Sample, histogram: Tensor, descent: Descent, tolerance: float
) -> Search[tuple[Interval, int]]:
    """A small interval around the sample's key of a rank, and how many keys it holds."""
    while True:
        descent, count = narrowed(descent, histogram)
        if descent.is_done or count <= tolerance:
            return (descent.low, descent.high), count
        histogram = yield binning(lambda: drawn.keys, descent)


def sample_size(num_elements: int) -> float:
    """How many keys to sample, over all ranks."""
    # 4 n^(2/3) balances the cost of the sample and of the keys that are collected.
    size: float = 4 * num_elements ** (2 / 3)
    return min(num_elements, max(4096.0, size))


def margin_of(centre: float, size: float) -> float:
    """How many ranks of the sample the bracket reaches to either side of ``centre``."""
    return _SIGMAS * math.sqrt(max(centre * (1 - centre / size), 0.0)) + 4


def _eight_pivots(low: int, high: int) -> set[int]:
    """Without a sample: cut the interval of keys into eight."""
    step = max(1, (high - low + 1) // 8)
    return {low + step * i - 1 for i in range(1, 8) if low <= low + step * i - 1 < high}


def sample(
    parts: Sequence[Candidates], rate: float, dead: int, generator: np.random.Generator
) -> Tensor:
    """Keys of a part of the counted elements of all parameters, 1-d.

    On the device that has all of them; else on the CPU.

    Args:
        rate: which part, about.
        dead: the key that stands for an element that does not compete.
        generator: of the positions.
    """
    found = []
    fused, taken = fused_for(parts, None)
    draws = []
    for position, part in enumerate(parts):
        if part.is_small:
            continue
        draw = _draw(position, part.counted, rate, generator)
        if not draw.num_drawn:
            continue
        if fused is not None and position in taken and fused.is_in_memory(part):
            draws.append(draw)
        else:
            runs = _runs(draw, part.counted, generator)
            found.append(kernels_on(part.device).gather(part, runs, dead))
    if fused is not None and draws:
        found += fused.sample(parts, draws, dead, int(generator.integers(1 << 62)))
    few = [position for position, part in enumerate(parts) if part.is_small]
    for batch in batches_of(parts, few, only_counted=True):
        whole = range(batch.bounds[-1])
        draw = _draw(0, whole, rate, generator)
        if draw.num_drawn:
            found.append(batch.gather(_runs(draw, whole, generator), dead))
    return join(found)


def _draw(position: int, counted: range, rate: float, generator: np.random.Generator) -> Draw:
    length = _RUN if len(counted) >= _SMALL else 1
    num_runs = len(counted) // length
    exact = math.ceil(len(counted) * rate) / length
    num_drawn = min(num_runs, int(exact) + int(generator.random() < exact % 1))
    return Draw(position, counted.start, length, num_runs, num_drawn)


def _runs(draw: Draw, counted: range, generator: np.random.Generator) -> Runs:
    # One run per stratum, jittered: regular data cannot hide between them.
    strata = np.arange(draw.num_drawn) + generator.random(draw.num_drawn)
    numbers = strata * (draw.num_runs / max(1, draw.num_drawn))
    numbers = np.minimum(numbers.astype(np.int64), draw.num_runs - 1)
    return Runs(counted.start, counted.stop, draw.length, torch.from_numpy(numbers))


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

    def around(self, low: int, high: int) -> Around:
        """What to count and collect of the keys in [low, high]."""
        first, last = self.threshold, self.threshold
        interval = None
        if self.half is not None:
            first, last = max(low, first - self.half), min(high, last + self.half)
            interval = (first, last) if first <= last else None
        if interval is None:
            first, last = self.threshold, self.threshold
        pivots = {pivot for pivot in (first - 1, last) if low <= pivot < high}
        return Around(pivots, interval, share=self.share, start=self)


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
