"""Sums of the scores of tiles, correctly rounded to float64: the rule of live models and files.

The sum of a tile is the float64 that is closest to the exact sum of its scores (of two as close,
the even one). It depends on nothing else: not on the order of the elements, nor on which ranks
have them, so tiles that the sharding cuts compare with all others.

[Note: limbs] Scores below 2**e are cut into limbs of 34 bits, each a whole number::

    score = limb 0 * 2**(e - 34) + limb 1 * 2**(e - 68) + ...

The limbs of a tile are added as integers, on one rank or on several. Of their sums the three
highest that are not zero, with a bit that stands for all lower ones, decide the rounded sum. Where
the exponents of a chunk are close to each other, as they are in most weights, its sums are exact
in float64 at once, and no limbs are made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from distprune._common.memory import Array

_LIMB_BITS = 34
# Slices are added instead of summing along an axis that is short: it is five times as fast.
_SHORT = 16
# Powers of two that float64 has.
_LARGEST_SHIFT = 1000


def num_bits_of(dtype: torch.dtype) -> int:
    """Bits that the significand of a score has, at most."""
    return 1 - round(math.log2(torch.finfo(dtype).eps)) if dtype.is_floating_point else 53


def limbs_for(dtype: torch.dtype) -> tuple[int, int]:
    """The exponent and the number of limbs that hold every score of a dtype; see [Note: limbs]."""
    top, lowest = (1024, -1074) if dtype is torch.float64 else (128, -149)
    return top, _num_limbs(top, lowest)


def sums_of_tiles(scores: Array, sizes: Sequence[int], num_bits: int) -> Array:
    """The sum of every tile of an array.

    Args:
        scores: float64, finite or infinite, no NaN; each dimension a multiple of its size.
        sizes: of a tile, per dimension.
        num_bits: :func:`num_bits_of` the scores.

    Returns:
        float64, one element per tile; NaN where a tile has both infinities.

    Cost: arrays of the size of the scores.
    """
    magnitudes = np.abs(scores)
    top = float(magnitudes.max(initial=0.0))
    if math.isinf(top):
        infinite = np.isinf(scores)
        finite = sums_of_tiles(np.where(infinite, 0.0, scores), sizes, num_bits)
        with np.errstate(invalid="ignore"):  # inf - inf is NaN, as it should be
            total: Array = finite + added(np.where(infinite, scores, 0.0), sizes)
        return total
    if top == 0.0:
        return added(magnitudes, sizes)
    exponent = math.frexp(top)[1]
    magnitudes[magnitudes == 0.0] = top
    # The exponent of the lowest bit that a score may have.
    lowest = max(math.frexp(float(magnitudes.min()))[1] - num_bits, -1074)
    if exponent - lowest + (math.prod(sizes) - 1).bit_length() <= 53:
        with np.errstate(over="ignore"):
            return added(scores, sizes)  # every partial sum is exact
    limbs = limbs_of_tiles(scores, sizes, exponent, _num_limbs(exponent, lowest))
    return rounded(limbs, exponent)


def limbs_of_tiles(
    scores: Array, sizes: Sequence[int], exponent: int, num_limbs: int
) -> list[Array]:
    """The sums of the limbs of every tile's scores, the highest limb first: int64.

    Args:
        scores: float64, finite; each dimension a multiple of its size.
        sizes: of a tile, per dimension.
        exponent: e of [Note: limbs].
        num_limbs: as many as hold all bits of the scores.
    """
    limbs = []
    for number in range(num_limbs):
        shift = _LIMB_BITS * (number + 1) - exponent
        limb = np.trunc(_scaled(scores, shift))
        scores = scores - _scaled(limb, -shift)
        limbs.append(added(limb.astype(np.int64), sizes))
    return limbs


def rounded(limbs: Sequence[Array], exponent: int) -> Array:
    """The closest float64 to sums of limbs.

    Args:
        limbs: int64, the first one is the highest; magnitudes below 2**62.
        exponent: e of [Note: limbs].
    """
    # One limb more at the top, and all but that one from 0 up to 2**34.
    sums = np.zeros((len(limbs) + 1, *limbs[0].shape), dtype=np.int64)
    sums[1:] = limbs
    _carry(sums)
    is_negative = sums[0] < 0
    sums[:, is_negative] *= -1
    _carry(sums)
    count = len(sums)
    sums = np.concatenate([sums, np.zeros((2, *sums.shape[1:]), dtype=np.int64)])
    first = np.argmax(sums != 0, axis=0)
    first = np.minimum(first, count - 1)
    high, middle, low = (np.take_along_axis(sums, (first + i)[None], axis=0)[0] for i in range(3))
    lower = np.arange(len(sums)).reshape(-1, *(1,) * first.ndim) > first + 2
    low |= ((sums != 0) & lower).any(axis=0)
    x, y = high.astype(np.float64) * 2.0 ** (2 * _LIMB_BITS), middle * 2.0**_LIMB_BITS
    total = x + y
    # What that rounding lost is exact, and so is its sum with the rest, which has 49 bits.
    total += (y - (total - x)) + low
    with np.errstate(over="ignore"):
        total = np.ldexp(total, exponent - _LIMB_BITS * (first + 2))
    result: Array = np.where(is_negative, -total, total)
    return result


def added(values: Array, sizes: Sequence[int]) -> Array:
    """The plain sum of every tile of an array, of its dtype."""
    for dim, size in enumerate(sizes):
        if size == 1:
            continue
        before = (slice(None),) * dim
        if size <= _SHORT:
            slices = [(*before, slice(first, None, size)) for first in range(size)]
            total = values[slices[0]].copy()
            for others in slices[1:]:
                total += values[others]
            values = total
        else:
            shape = values.shape
            values = values.reshape(*shape[:dim], shape[dim] // size, size, *shape[dim + 1 :])
            values = values.sum(axis=dim + 1)
    return values


def _num_limbs(exponent: int, lowest: int) -> int:
    """How many limbs hold all bits from 2**lowest up to 2**exponent."""
    return max(1, -(-(exponent - lowest) // _LIMB_BITS))


def _carry(sums: Array) -> None:
    """Bring all limbs but the first into [0, 2**34), in place."""
    for number in range(len(sums) - 1, 0, -1):
        carried = sums[number] >> _LIMB_BITS
        sums[number] -= carried << _LIMB_BITS
        sums[number - 1] += carried


def _scaled(values: Array, shift: int) -> Array:
    """``values * 2**shift``, exactly where the result has no more bits than float64."""
    if abs(shift) <= _LARGEST_SHIFT:
        near: Array = values * math.ldexp(1.0, shift)
        return near
    far: Array = np.ldexp(values, shift)
    return far
