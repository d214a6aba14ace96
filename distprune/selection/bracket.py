"""Where a search for the k-th key looks: around that of a sample.

Source: Floyd and Rivest, "Expected time bounds for selection", CACM 1975.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distprune.base.memory import Runs, join
from distprune.selection.candidates import Candidates, Draw, Interval
from distprune.selection.kernels import fused_for, kernels_on
from distprune.selection.radix import Descent, Search, binning, descent_over, narrowed, share_within
from distprune.selection.small import batches_of

# A bracket this many standard deviations wide misses about once in a million.
_SIGMAS = 5.0
# Up to so many elements in all are collected outright: a sample would not pay.
COLLECT_ALL = 1 << 16
# A key with more than this fraction of the sample is counted, not collected.
_HEAVY = 0.01
# Neighbours that are sampled together, as a cache line brings them anyway; one by one from
# parameters of fewer elements than the second number.
_RUN, _SMALL = 16, 4096


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
        sample: the sample that suggested the interval, if one did.
        share: about which fraction of the elements of all ranks lies in the interval.
    """

    pivots: set[int]
    interval: Interval | None
    sample: _Sample | None = None
    share: float = 1.0

    def expected_share(self) -> float:
        """About which fraction of this rank's elements lies in the interval."""
        if self.interval is None:
            return 0.0
        if self.sample is None:
            return self.share
        return share_within(self.sample.keys, *self.interval)


def bracket(
    parts: Sequence[Candidates],
    k: int,
    num_inside: int,
    low: int,
    high: int,
    *,
    highest: int,
    num_missed: int,
    generator: np.random.Generator,
) -> Search[Around]:
    """Pivots around the k-th of the ``num_inside`` keys in [low, high], and what to collect.

         low            first  k-th  last             high
          |--------------[------x-----]----------------|
               counted      collected       counted

    Both are the same on every rank, because they depend on summed histograms only.

    Args:
        highest: the largest key of all; one more stands for elements that do not compete.
        num_missed: how many brackets have missed so far; each doubles the sample.
        generator: of the positions to sample.
    """
    total = sum(part.numel for part in parts)
    rate = min(1.0, sample_size(total) * 2**num_missed / total)
    drawn = _Sample(torch.empty(0, dtype=torch.int64))

    def draw() -> Tensor:
        drawn.keys = sample(parts, rate, highest + 1, generator)
        return drawn.keys

    descent = descent_over(low, high)
    histogram = yield binning(draw, descent)
    size = int(histogram.sum())
    if size == 0:
        return Around(eight_pivots(low, high), None)
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
        return Around(eight_pivots(low, high), None)
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


def eight_pivots(low: int, high: int) -> set[int]:
    """Keys that cut an interval of keys into eight; where it has fewer, into single keys."""
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
