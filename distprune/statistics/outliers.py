"""Outlier ratios of scores, as OWL needs them: exact counts, the same on every sharding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from distprune._common import exact_sums, memory
from distprune._common.collectives import Communicator
from distprune._common.memory import Count, Scratch
from distprune.selection.normalizing import (
    Scored,
    grid_sums,
    largest_scores,
    live_array,
    live_flags,
    per_chunk,
)
from distprune.selection.scores import FactorScores, ScoreSource, TensorScores, widened
from distprune.shards.factored import FactoredScores
from distprune.shards.target import Target


def outlier_ratios(
    targets: Sequence[Target],
    num_live: Sequence[int],
    scores: Mapping[str, FactoredScores],
    block_of: Callable[[str], str],
    multiple: float,
    communicator: Communicator,
) -> dict[str, float]:
    """The share of live scores above a multiple of the mean score, per block. Collective.

    Args:
        targets: the parameters; the same on every rank.
        num_live: unpruned elements of every whole parameter.
        scores: of each parameter, by its label.
        block_of: from a label to the name of its block: the mean is that of a block's scores.
        multiple: of the mean.
        communicator: the ranks that have the parameters.

    Returns:
        By label, the ratio of its block.

    Cost: three reads of the weights; all-reduces of 8, 16 and 8 bytes per parameter. The mean is
    exact to 2**-36 of the largest score, and does not depend on the sharding: exact_sums.
    """
    parts = [_scored(target, scores[target.label]) for target in targets]
    blocks = [block_of(target.label) for target in targets]
    largest = largest_scores(parts, "an outlier ratio", communicator)
    for target, value in zip(targets, largest, strict=True):
        if math.isnan(value):
            raise ValueError(f"{target.label}: a score is NaN; expected finite weights.")
    # One grid for all parameters of a block, so that their sums add up.
    top = dict.fromkeys(blocks, 0.0)
    for name, value in zip(blocks, largest, strict=True):
        top[name] = max(top[name], value)
    exponent_of = {name: exact_sums.exponent_of(value) for name, value in top.items()}
    exponents = [exponent_of[name] if top[name] > 0 else None for name in blocks]
    totals, sizes = dict.fromkeys(blocks, 0), dict.fromkeys(blocks, 0)
    for name, total, size in zip(
        blocks, grid_sums(parts, exponents, 1, communicator), num_live, strict=True
    ):
        totals[name] += total
        sizes[name] += size
    means = {
        name: exact_sums.statistic("mean", totals[name], exponent_of[name], sizes[name])
        for name in top
    }
    thresholds = [multiple * means[name] for name in blocks]

    def count() -> Tensor:
        measures = [partial(_count_above, threshold) for threshold in thresholds]
        return torch.tensor([sum(chunks) for chunks in per_chunk(parts, measures)])

    counts = dict.fromkeys(blocks, 0)
    for name, number in zip(blocks, communicator.reduce(len(parts), count).tolist(), strict=True):
        counts[name] += number
    return {
        target.label: counts[name] / max(1, sizes[name])
        for target, name in zip(targets, blocks, strict=True)
    }


def _scored(target: Target, scores: FactoredScores) -> Scored:
    shard = target.shard
    source: ScoreSource
    if target.places:
        source = FactorScores.of_shard(shard, scores, are_signed=True)
    else:  # of other ranks: no element of it is here
        source = TensorScores(shard.values)
    return Scored(
        target.label,
        source,
        None if shard.mask is None else shard.flat(shard.mask),
        shard.counted,
        shard.values.device,
    )


def _count_above(threshold: float, part: Scored, span: range, scratch: Scratch) -> Count:
    """Live scores above a number of float64."""
    scores = part.scores.load(span.start, span.stop, scratch)
    if not memory.takes_numpy(part.device):
        above = scores.double() > threshold
        live = live_flags(part, span)
        return (above if live is None else above & live).sum()
    wide = widened(scores, scratch, part.dtype)
    limit = wide.dtype.type(threshold)
    if limit > threshold:  # rounded up: what lies above the next number below lies above the limit
        limit = np.nextafter(limit, wide.dtype.type(0))
    above = np.greater(wide, limit, out=scratch.array("above", wide.size, bool))
    if part.live is not None:
        above &= live_array(part.live, span, scratch)
    return int(np.count_nonzero(above))
