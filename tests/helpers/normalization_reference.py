"""The oracle of normalised scores: rational numbers, and one rounding where the library has one."""

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor


def normalized(scores: Tensor, normalize: str | None, keep: Tensor | None = None) -> Tensor:
    """Scores of a whole parameter divided by a statistic of those that are kept.

    Args:
        scores: floating point.
        normalize: "rms", "l2", "mean" or None.
        keep: bool, of the same shape; None: all.
    """
    if normalize is None:
        return scores
    wide = scores.double() if scores.dtype == torch.float64 else scores.float()
    numbers = wide.flatten() if keep is None else wide[keep]
    power = 1 if normalize == "mean" else 2
    largest = max((abs(value) for value in numbers.tolist()), default=0.0)
    if math.isnan(largest) or not largest:
        return wide
    unit = Fraction(2) ** (power * math.frexp(largest)[1] - 36)
    total = sum(round(abs(Fraction(value)) ** power / unit) for value in numbers.tolist()) * unit
    mean = total if normalize == "l2" else total / len(numbers)
    divisor = float(mean) if power == 1 else _square_root(mean)
    if wide.dtype == torch.float64:
        return wide * (1 / divisor)
    # 24 binary digits, of any exponent; the product is exact in float64, and is rounded once.
    fraction, exponent = math.frexp(1 / divisor)
    scale = math.ldexp(float(np.float32(fraction)), exponent)
    return (wide.double() * scale).float()


def _square_root(number: Fraction) -> float:
    """The square root of a fraction whose exponent float64 may not hold."""
    shift = (number.numerator.bit_length() - number.denominator.bit_length()) // 2
    return math.ldexp(math.sqrt(number / Fraction(2) ** (2 * shift)), shift)
