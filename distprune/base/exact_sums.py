"""Sums of |score| and score**2 that do not depend on the order of the terms, and normalisation.

[Note: grid] A floating-point sum depends on its order, and so on how elements are spread over
ranks and chunks. Here every term is rounded once to a common grid, 2**-36 of the largest one, and
the terms are added as integers. Integer sums have no order:

    largest |score| of the parameter       ->  exponent, the same on every rank
    round(|score|**power on the grid)      ->  integers below 2**36
    their sums over chunks and over ranks  ->  one integer, exact

A term is wrong by at most half a unit of the grid, so the sum of n terms by about sqrt(n) * 2**-38
of the largest one: the mean square of 10**8 scores of which the largest is 1000 times their rms
has a relative error of about 10**-9.

Live models and files divide scores by the same rule: :func:`exponent_of`,
:func:`grid_sum`, :func:`statistic`, :func:`scale_of`, :func:`scale_scores`.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from distprune.base.memory import SERIAL, Array, Scratch

Normalization = Literal["rms", "l2", "mean"]
NORMALIZATIONS: tuple[str, ...] = get_args(Normalization)

# Of a parameter, for sums; the smallest is its inverse. float64 has statistics and their inverses.
LARGEST_SCORE = 2.0**900
GRID_BITS = 36  # SERIAL terms, 2**15, have a sum below 2**53: exact in float64
WORD = 1 << 32  # sums are two integers, whose own sums over ranks fit into int64


def check_normalization(normalize: object) -> None:
    """Raise ValueError unless the argument ``normalize`` is one of "rms", "l2", "mean", or None."""
    if normalize is not None and normalize not in NORMALIZATIONS:
        raise ValueError(
            f"normalize={normalize!r}; expected {', '.join(map(repr, NORMALIZATIONS))} or None."
        )


def power_of(normalize: Normalization) -> Literal[1, 2]:
    """The power of |score| that a normalisation adds up."""
    return 1 if normalize == "mean" else 2


def exponent_of(largest: float) -> int:
    """The smallest e with |score| < 2**e for all scores, given the largest of all ranks."""
    return math.frexp(largest)[1]


def grid_sum(
    magnitudes: Array,
    exponent: int,
    power: Literal[1, 2],
    scratch: Scratch,
    counts: Array | None = None,
) -> int:
    """Sum of |score|**power in units of the grid, on a CPU: see [Note: grid].

    Args:
        magnitudes: 1-d, float32 or float64, finite, not negative, below 2**exponent.
        exponent: :func:`exponent_of` the largest score of the whole parameter.
        power: 1 or 2.
        scratch: memory to use again.
        counts: int64, how often each term is added; None: once.

    Cost: one read; scratch memory of 256 KiB.
    """
    total, scale = 0, _scale(exponent, power)
    for start in range(0, magnitudes.size, SERIAL):
        block = magnitudes[start : start + SERIAL]
        terms = scratch.array("terms", block.size, np.float64)
        np.multiply(block, scale, out=terms, dtype=np.float64)
        if power == 2:
            terms *= terms
        np.rint(terms, out=terms)
        if counts is None:
            total += int(terms.sum())
        else:  # Python's integers: the sum may have more than 64 bits
            own = counts[start : start + SERIAL]
            total += int(terms.astype(np.int64).astype(object) @ own)
    return total


def grid_sum_on_device(magnitudes: Tensor, exponent: int, power: Literal[1, 2]) -> Tensor:
    """:func:`grid_sum` of at most 2**26 scores on any device: int64, 0-d; does not wait for it."""
    terms = magnitudes.double() * _scale(exponent, power)
    return (terms.square_() if power == 2 else terms).round_().long().sum()


def statistic(normalize: Normalization, total: int, exponent: int, num_elements: int) -> float:
    """What scores are divided by: their rms, their l2 norm, or the mean of |score|.

    Args:
        normalize: which of them.
        total: :func:`grid_sum` over all ranks.
        exponent: of the grid.
        num_elements: elements in the sum, over all ranks.

    Returns:
        0.0, by which nothing is divided, of scores that are all zero.
    """
    # Integers: their quotient is rounded once.
    amount = total / (1 if normalize == "l2" else max(1, num_elements))
    power = power_of(normalize)
    root = math.sqrt(amount) if power == 2 else amount
    return math.ldexp(root, exponent - GRID_BITS // power)


def scale_of(divisor: float, dtype: torch.dtype) -> float:
    """What scores are multiplied by, 1 / divisor with as many digits as their dtype has.

    1.0 for a parameter whose scores are all zero. For scores in float32 the exponent is that of
    float64: 1 / divisor of denormal scores is larger than any float32. See :func:`product_dtype`.

    Args:
        divisor: :func:`statistic`.
        dtype: torch.float32 or torch.float64, of the scores.
    """
    if divisor == 0.0:
        return 1.0
    inverse = 1.0 / divisor
    if dtype is torch.float64:
        return inverse
    fraction, exponent = math.frexp(inverse)
    return math.ldexp(float(np.float32(fraction)), exponent)


def product_dtype(scale: float, dtype: torch.dtype) -> torch.dtype:
    """In which dtype scores are multiplied, so that the product is rounded once, to ``dtype``.

    That of the scores; float64 where their scale is no normal float32. The product of two numbers
    with the digits of a float32 is exact in float64.
    """
    limits = torch.finfo(torch.float32)
    is_normal = limits.smallest_normal <= scale <= limits.max
    return dtype if is_normal else torch.float64


def scale_scores(scores: Array, scale: float, out: Array) -> Array:
    """``scores * scale``, rounded once to their dtype; on a CPU. ``out`` may be the scores."""
    is_wide = out.dtype == np.float32 and product_dtype(scale, torch.float32) is torch.float64
    with np.errstate(over="ignore"):  # scores that do not count
        if is_wide:
            np.multiply(scores, scale, out=out, dtype=np.float64, casting="same_kind")
        else:
            np.multiply(scores, out.dtype.type(scale), out=out)
    return out


def _scale(exponent: int, power: Literal[1, 2]) -> float:
    """The power of two that takes a score to the grid."""
    return math.ldexp(1.0, GRID_BITS // power - exponent)
