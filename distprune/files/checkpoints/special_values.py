"""How many numbers are zero, NaN and infinite, in tensors that are no plain floats.

Masks and comparisons know the formats of :mod:`distprune.files.checkpoints.scanning` only. This
module serves ``inspect``: integers, booleans, complex numbers, and the formats of 8 and 4 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distprune.files.checkpoints.scanning import FORMATS

_INTEGERS = {
    "BOOL": np.uint8, "U8": np.uint8, "I8": np.uint8, "U16": np.uint16, "I16": np.uint16,
    "U32": np.uint32, "I32": np.uint32, "U64": np.uint64, "I64": np.uint64,
}  # fmt: skip
# Of formats of one byte: which bytes are zero, NaN and infinite.
_BYTES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "F8_E4M3": ((0x00, 0x80), (0x7F, 0xFF), ()),
    "F8_E5M2": ((0x00, 0x80), (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), (0x7C, 0xFC)),
    "F8_E4M3FNUZ": ((0x00,), (0x80,), ()),
    "F8_E5M2FNUZ": ((0x00,), (0x80,), ()),
    "F8_E8M0": ((), (0xFF,), ()),
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
    return dtype in FORMATS or dtype.startswith(("F", "C"))


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
    return SpecialValues(*(int(counts[list(values)].sum()) for values in _BYTES[dtype]))
