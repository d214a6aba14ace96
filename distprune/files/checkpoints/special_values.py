"""How many numbers are zero, NaN and infinite, in tensors that are no plain floats.

Masks and comparisons know the formats of :mod:`distprune.files.checkpoints.scanning` only. This
module serves ``inspect``: integers, booleans, complex numbers, and the formats of 8 and 4 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distprune._common.float_formats import FLOATS, NARROW_FLOATS

_INTEGERS = {
    "BOOL": np.uint8, "U8": np.uint8, "I8": np.uint8, "U16": np.uint16, "I16": np.uint16,
    "U32": np.uint32, "I32": np.uint32, "U64": np.uint64, "I64": np.uint64,
}  # fmt: skip
# By format of one byte: which bytes are zero, NaN and infinite.
_BYTES = {
    form.name: [
        [byte for byte in range(256) if test(byte)]
        for test in (form.is_zero, form.is_nan, form.is_inf)
    ]
    for form in NARROW_FLOATS.values()
    if form.num_bits == 8
}


@dataclass(frozen=True, slots=True)
class SpecialValues:
    """Counts: +0 and -0, NaN, and infinities of both signs."""

    num_zero: int
    num_nan: int = 0
    num_inf: int = 0


def is_countable(dtype: str) -> bool:
    """Whether :func:`count_special` knows a dtype; it is spelt as in a header."""
    return dtype in _INTEGERS or dtype in _BYTES or dtype in ("C64", "F4")


def is_float(dtype: str) -> bool:
    """Whether a dtype is one of real or complex floating-point numbers, of any width."""
    return dtype in FLOATS or dtype.startswith(("F", "C"))


def count_special(dtype: str, raw: np.ndarray) -> SpecialValues:
    """Count in a piece of a tensor.

    A complex number is NaN, or infinite, if one of its parts is, as in torch.

    Args:
        dtype: one for which :func:`is_countable` is true.
        raw: whole numbers, as uint8.
    """
    if dtype in _INTEGERS:
        numbers = raw.view(_INTEGERS[dtype])
        return SpecialValues(numbers.size - int(np.count_nonzero(numbers)))
    if dtype == "C64":
        pairs = raw.view(np.complex64)
        counts = (np.count_nonzero(test(pairs)) for test in (np.isnan, np.isinf))
        return SpecialValues(pairs.size - int(np.count_nonzero(pairs)), *map(int, counts))
    if dtype == "F4":  # two in a byte; the lower three bits of each are its magnitude
        halves = (raw & 0x07, raw & 0x70)
        return SpecialValues(sum(half.size - int(np.count_nonzero(half)) for half in halves))
    counts = np.bincount(raw, minlength=256)
    return SpecialValues(*(int(counts[values].sum()) for values in _BYTES[dtype]))
