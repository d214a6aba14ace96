"""Counts of zero, NaN and infinite numbers in tensors that are not plain floats.

``inspect`` counts them in integers, booleans, complex numbers, and floats of 8 and 4 bits; other
commands read plain floats only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distprune._common.float_formats import FLOATS, NARROW_FLOATS

_INTEGERS = {
    "BOOL": np.uint8, "U8": np.uint8, "I8": np.uint8, "U16": np.uint16, "I16": np.uint16,
    "U32": np.uint32, "I32": np.uint32, "U64": np.uint64, "I64": np.uint64,
}  # fmt: skip
# By format of one byte, the bytes that are zero, NaN and infinite.
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
    """Whether :func:`count_special` accepts a dtype, spelt as in a header."""
    return dtype in _INTEGERS or dtype in _BYTES or dtype in ("C64", "F4")


def is_float(dtype: str) -> bool:
    """Whether a dtype is of real or complex floating-point numbers, of any width."""
    return dtype in FLOATS or dtype.startswith(("F", "C"))


def count_special(dtype: str, raw: np.ndarray) -> SpecialValues:
    """Count zeros, NaN and infinities in a piece of a tensor.

    A complex number is NaN, or infinite, if one of its parts is, as in torch.

    Args:
        dtype: one for which :func:`is_countable` is true.
        raw: uint8, 1-d; complete numbers.
    """
    if dtype in _INTEGERS:
        numbers = raw.view(_INTEGERS[dtype])
        return SpecialValues(numbers.size - int(np.count_nonzero(numbers)))
    if dtype == "C64":
        pairs = raw.view(np.complex64)
        return SpecialValues(
            num_zero=pairs.size - int(np.count_nonzero(pairs)),
            num_nan=int(np.count_nonzero(np.isnan(pairs))),
            num_inf=int(np.count_nonzero(np.isinf(pairs))),
        )
    if dtype == "F4":  # two numbers per byte; the lower three bits of each are its magnitude
        halves = (raw & 0x07, raw & 0x70)
        return SpecialValues(sum(half.size - int(np.count_nonzero(half)) for half in halves))
    counts = np.bincount(raw, minlength=256)
    return SpecialValues(*(int(counts[values].sum()) for values in _BYTES[dtype]))
