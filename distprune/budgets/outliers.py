"""Outlier ratios, for OWL: the share of scores that are far above the mean of their block."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from distprune.base import exact_sums
from distprune.base.memory import Count, Scratch
from distprune.base.naming import UnfitScores
from distprune.ranking.sums import Scored, grid_sums, largest_scores, per_chunk
from distprune.ranks.collectives import Communicator

OWL_MULTIPLE = 5.0  # by default, an outlier is above so many times the mean of its block
# Up to the first number in a name: "model.layers.3." of "model.layers.3.mlp.up_proj.weight".
_BLOCK = re.compile(r"^(?:[^.]+\.)*?\d+(?=\.)")


@runtime_checkable
class HasOutlierRatios(Protocol):
    """Activation statistics that give outlier ratios."""

    def outlier_ratios(
        self, *, threshold_multiple: float, per: Literal["block", "parameter"]
    ) -> Mapping[Any, float]:
        """By (module, name): the share of scores above ``threshold_multiple`` times their mean."""
        ...


def block_of(name: str) -> str:
    """The name of the block of a parameter: up to its first number, or all of it."""
    found = _BLOCK.match(name)
    return found[0] if found else name


def outlier_ratios(
    parts: Sequence[Scored],
    num_live: Sequence[int],
    blocks: Sequence[str],
    multiple: float,
    communicator: Communicator,
) -> list[float]:
    """The share of live scores above a multiple of the mean score, per block. Collective.

    Args:
        parts: this rank's part of every parameter; the same list on all ranks.
        num_live: unpruned elements of every whole parameter.
        blocks: per parameter, the name of its block: the mean is that of a block's scores.
        multiple: of the mean.
        communicator: the ranks that have the parts.

    Returns:
        Per parameter, the ratio of its block.

    Raises:
        ValueError: a live score is NaN or infinite; names its parameter.

    Cost: three reads of the scores; all-reduces of 8, 16 and 8 bytes per parameter. The mean is
    exact to 2**-36 of the largest score, and does not depend on the sharding: exact_sums.
    """
    largest = largest_scores(parts, "an outlier ratio", communicator)
    names = [part.name for part, value in zip(parts, largest, strict=True) if math.isnan(value)]
    if names:
        text = f"{', '.join(names)}: a score is NaN; expected finite weights."
        raise UnfitScores(text, "nan", names)
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
    return [counts[name] / max(1, sizes[name]) for name in blocks]


def _count_above(threshold: float, part: Scored, span: range, scratch: Scratch) -> Count:
    """Live |scores| above a number of float64, which is not negative."""
    magnitudes = part.magnitudes(span, scratch)
    if isinstance(magnitudes, Tensor):
        return (magnitudes > threshold).sum()
    limit = magnitudes.dtype.type(threshold)
    if limit > threshold:  # rounded up: what lies above the next number below lies above the limit
        limit = np.nextafter(limit, magnitudes.dtype.type(0))
    above = np.greater(magnitudes, limit, out=scratch.array("above", magnitudes.size, bool))
    return int(np.count_nonzero(above))
