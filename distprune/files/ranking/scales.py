"""Normalised scores: magnitudes, multiplied by one number for each tensor.

[Note: native keys] The score of an element is fp32(|w| * scale) (fp64 for fp64 weights), by the
rule of ``_common.exact_sums`` that live models follow. Multiplication by a positive number and
rounding keep the order, so the elements of a tensor whose scores are below a threshold are those
whose own magnitude bits are below some key, and those that tie with it are an interval of keys::

    magnitude bits of a tensor    0 .......... first ....... stop ........ inf
    score                          below t    |  equal to t |   above t

So thresholds of scores become thresholds of bits, and the pass that writes multiplies nothing.
Several magnitudes may have the same score; they tie, and go in the order of their indices.
"""

from __future__ import annotations

import numpy as np
import torch

from distprune._common.exact_sums import scale_of, scale_scores
from distprune._common.float_formats import PLAIN_FLOATS, magnitude_mask, unsigned_type
from distprune.files.ranking.keys import Array, KeyFormat, widened

_COMPARED = 256  # magnitudes at a time, in a search for one of them


class Scale:
    """The scores of one tensor's elements.

    Args:
        dtype: of the tensor.
        divisor: what its magnitudes are divided by.
        key_format: of the scores' keys: F32, or F64 if a tensor of the group is.
    """

    def __init__(self, dtype: str, divisor: float, key_format: KeyFormat) -> None:
        self.divisor = divisor
        self._dtype = dtype
        self._key_format = key_format
        self._score_dtype = score_dtype(dtype)
        torch_dtype = torch.float64 if self._score_dtype == "F64" else torch.float32
        self._scale = scale_of(divisor, torch_dtype)

    def score_keys(self, bits: Array) -> Array:
        """The keys of elements' scores; those of NaN are above ``key_format.largest_number``.

        Args:
            bits: of the elements, as they are stored.
        """
        scores = magnitudes(bits, self._dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            scale_scores(scores, self._scale, scores)
        width = self._key_format.width
        keys = widened(scores.view(unsigned_type(8 * scores.itemsize)), self._score_dtype, width)
        # The bits of a NaN may have a sign.
        magnitude_bits: Array = keys & self._key_format.dtype(magnitude_mask(width))
        return magnitude_bits

    def interval(self, key: int) -> tuple[int, int]:
        """The magnitude bits [first, stop) whose scores have a key; see [Note: native keys]."""
        return self._first_from(key), self._first_from(key + 1)

    def _first_from(self, key: int) -> int:
        """The smallest magnitude bits, without NaN, whose score's key is at least ``key``."""
        low, high = 0, PLAIN_FLOATS[self._dtype].inf + 1
        while low < high:
            step = max((high - low) // _COMPARED, 1)
            candidates = np.arange(low, high, step, dtype=np.uint64)
            keys = self.score_keys(candidates.astype(PLAIN_FLOATS[self._dtype].bits))
            num_below = int(np.count_nonzero(keys < self._key_format.dtype(key)))
            if num_below < len(candidates):
                high = int(candidates[num_below])
            low = int(candidates[num_below - 1]) + 1 if num_below else low
        return low


def score_dtype(dtype: str) -> str:
    """The format in which the scores of a tensor are computed."""
    return "F64" if dtype == "F64" else "F32"


def magnitudes(bits: Array, dtype: str) -> Array:
    """|w| as float32, or as float64 of fp64 weights; a fresh array.

    Args:
        bits: of elements, as they are stored.
        dtype: of the elements.
    """
    width = PLAIN_FLOATS[score_dtype(dtype)].num_bits
    plain = bits & bits.dtype.type(magnitude_mask(PLAIN_FLOATS[dtype].num_bits))
    values: Array = widened(plain, dtype, width).view(f"f{width // 8}")
    return values
