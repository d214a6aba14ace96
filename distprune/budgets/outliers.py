"""OWL: layers with more outliers keep more of their elements."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from distprune.base import exact_sums, memory
from distprune.base.amount import Bounded
from distprune.base.memory import Count, Scratch
from distprune.base.naming import UnfitScores
from distprune.budgets.base import Budget, Line
from distprune.ranks.collectives import Communicator
from distprune.selection.normalizing import (
    Scored,
    grid_sums,
    largest_scores,
    live_array,
    live_flags,
    per_chunk,
)
from distprune.selection.scores import widened

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


class OWL(Budget):
    """Outlier-weighed layerwise sparsity: the more outliers a layer has, the denser it stays.

    Let D be the outlier ratios, one per block. As in the authors' code the densities are::

        r = (D - min D) / (max D - min D) * 2 * lam        of each block, between 0 and 2 * lam
        density = r + shift                                one shift for all

    where the shift makes the total exact. For blocks of one size it is the authors' ``1 - S -
    mean(r)``, so that the mean of the sparsities is S; where sizes differ, their mean over all
    elements is. Densities above 1 or below 0 are clipped, and the others are shifted further.
    (The paper says |S_l - S| <= lam. Its code, and this, spread the densities over a range of 2 *
    lam whose mean, not whose middle, is 1 - S.)

    Args:
        ratios: outlier ratio of each parameter, >= 0, by (module, name), by full name, or by the
            name of a block ("model.layers.3") for all parameters below it; or activation
            statistics of :mod:`distprune.statistics`, of which ``outlier_ratios`` is called here,
            once, on every rank. They have to be equal on all ranks.
        lam: half the range of the densities; the paper uses 0.08, for language models at 70 %.
        threshold_multiple: with statistics, a score is an outlier if it is larger than this
            multiple of the mean of its block. The paper uses 5 (LLaMA), or 7 and 10.
        per: "block": parameters of one block share a ratio, as in the paper: the mean of theirs,
            weighted by elements. A block is the name up to its first number ("model.layers.3" of
            "model.layers.3.mlp.up_proj.weight"); a name without one is a block of its own.
            "parameter": each has its own ratio.

    Raises:
        TypeError, ValueError: ratios that are no numbers, or negative; ``lam`` outside [0, 1/2].

    Cost: nothing is read or sent in the call, beyond what the statistics took.

    Source: Yin et al., "Outlier weighed layerwise sparsity (OWL)", arXiv 2310.05175.
    """

    def __init__(
        self,
        ratios: Mapping[Any, float] | HasOutlierRatios,
        *,
        lam: float = 0.08,
        threshold_multiple: float = OWL_MULTIPLE,
        per: Literal["block", "parameter"] = "block",
    ) -> None:
        if per not in ("block", "parameter"):
            raise ValueError(f"per={per!r}; expected 'block' or 'parameter'.")
        if not isinstance(ratios, Mapping):
            if not isinstance(ratios, HasOutlierRatios):
                raise TypeError(
                    f"ratios is a {type(ratios).__name__}; expected a mapping from (module, name) "
                    "or full name to an outlier ratio, or statistics that have outlier_ratios()."
                )
            ratios = ratios.outlier_ratios(threshold_multiple=threshold_multiple, per=per)
        self.ratios = {key: _ratio(key, value) for key, value in ratios.items()}
        self.lam = _number("lam", lam)
        if not 0 <= self.lam <= Fraction(1, 2):
            raise ValueError(f"lam={lam!r} is not in [0, 0.5]; expected half a range of densities.")
        self.per = per

    def __repr__(self) -> str:
        return f"OWL({len(self.ratios)} ratios, lam={float(self.lam)}, per={self.per!r})"

    def lines(self, parameters: Sequence[Bounded]) -> list[Line]:
        ratios = self._per_parameter(parameters)
        low = min(ratios, default=Fraction(0))
        spread = max(ratios, default=low) - low
        densities = [
            (ratio - low) / spread * 2 * self.lam if spread else Fraction(0) for ratio in ratios
        ]
        sizes = [parameter.num_elements for parameter in parameters]
        # The level is minus the shift.
        return [Line(n * (1 - r), n) for n, r in zip(sizes, densities, strict=True)]

    def _per_parameter(self, parameters: Sequence[Bounded]) -> list[Fraction]:
        # Not above: it loads torch, and recipes are read without.
        from distprune.base.naming import plain_key

        ratios = {plain_key(key): ratio for key, ratio in self.ratios.items()}
        used: set[Hashable] = set()
        own = []
        for parameter in parameters:
            keys = [key for key in parameter.keys if key in ratios]
            keys = keys or self._blocks_of(parameter)
            if not keys:
                raise ValueError(
                    f"OWL has no outlier ratio for {parameter.label}; expected one of every "
                    "parameter of the call, under its (module, name), its full name, or the name "
                    "of its block. Leave out parameters without statistics."
                )
            used.update(keys)
            if len({ratios[key] for key in keys}) > 1:
                raise ValueError(
                    f"OWL has several outlier ratios for {parameter.label}; expected one."
                )
            own.append(ratios[keys[0]])
        if not used and self.ratios:
            raise ValueError("OWL has outlier ratios of none of the parameters.")
        if self.per == "parameter":
            return own
        blocks: dict[str, tuple[Fraction, int]] = {}
        for parameter, ratio in zip(parameters, own, strict=True):
            total, size = blocks.get(block_of(parameter.label), (Fraction(0), 0))
            total += ratio * parameter.num_elements
            blocks[block_of(parameter.label)] = total, size + parameter.num_elements
        means = {name: total / size if size else total for name, (total, size) in blocks.items()}
        return [means[block_of(parameter.label)] for parameter in parameters]

    def _blocks_of(self, parameter: Bounded) -> list[Hashable]:
        """The longest name among the ratios that is a path above the parameter, if any."""
        paths = [
            key
            for key in self.ratios
            if isinstance(key, str)
            and any(isinstance(name, str) and name.startswith(key + ".") for name in parameter.keys)
        ]
        return [max(paths, key=len)] if paths else []


def block_of(name: str) -> str:
    """The name of the block of a parameter: up to its first number, or all of it."""
    found = _BLOCK.match(name)
    return found[0] if found else name


def _ratio(key: object, value: object) -> Fraction:
    shown = f"({type(key[0]).__name__}, {key[1]!r})" if isinstance(key, tuple) else repr(key)
    ratio = _number(f"the outlier ratio of {shown}", value)
    if ratio < 0:
        raise ValueError(f"the outlier ratio of {shown} is {value!r}; expected one >= 0.")
    return ratio


def _number(what: str, value: object) -> Fraction:
    """A finite number, as the decimal that was written."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what} is a {type(value).__name__}; expected a number.")
    if not math.isfinite(value):
        raise ValueError(f"{what} is {value!r}; expected a finite number.")
    return Fraction(value) if isinstance(value, numbers.Rational) else Fraction(repr(float(value)))


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
    """Live |scores| above a number of float64."""
    scores = part.scores.load(span.start, span.stop, scratch)
    if not memory.takes_numpy(part.device):
        above = scores.double().abs() > threshold
        live = live_flags(part, span)
        return (above if live is None else above & live).sum()
    wide = widened(scores, scratch, part.dtype)
    limit = wide.dtype.type(threshold)
    if limit > threshold:  # rounded up: what lies above the next number below lies above the limit
        limit = np.nextafter(limit, wide.dtype.type(0))
    magnitudes = np.abs(wide, out=scratch.array("magnitudes", wide.size, wide.dtype))
    above = np.greater(magnitudes, limit, out=scratch.array("above", wide.size, bool))
    if part.live is not None:
        above &= live_array(part.live, span, scratch)
    return int(np.count_nonzero(above))
