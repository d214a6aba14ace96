"""The floating-point formats of weights: their names, and what their bits mean.

This is the only table of formats in the package. Everything is said in bit patterns, because numpy
has no bfloat16 and no format of 8 bits. Importing the table does not import numpy, so that commands
that read headers alone start quickly.

    F32   s eeeeeeee fffffffffffffffffffffff      s: sign, e: exponent, f: fraction
    BF16  s eeeeeeee fffffff
    F16   s eeeee ffffffffff
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class Specials(Enum):
    """Which bit patterns of a format are not finite numbers, and which are zero."""

    IEEE = "the largest exponent is inf with fraction 0, and NaN with any other; zeros have a sign"
    FN = "no inf; NaN if all bits below the sign are set; zeros have a sign"
    FNUZ = "no inf; NaN is the pattern of -0; one zero"
    FINITE = "no inf and no NaN; zeros have a sign"
    SCALE = "a power of two without a sign: no inf and no zero; NaN if all bits are set"


@dataclass(frozen=True)
class FloatFormat:
    """How the bits of a number are used.

    Attributes:
        name: as safetensors headers spell it.
        torch_name: of the torch dtype; "" if torch has none with one number per element.
        num_exponent_bits, num_fraction_bits: of a number.
        specials: which patterns are zero, inf and NaN.
    """

    name: str
    torch_name: str
    num_exponent_bits: int
    num_fraction_bits: int
    specials: Specials = Specials.IEEE

    @property
    def num_bits(self) -> int:
        """Bits of a number, the sign included."""
        sign = 0 if self.specials is Specials.SCALE else 1
        return sign + self.num_exponent_bits + self.num_fraction_bits

    @property
    def num_bytes(self) -> int:
        """Bytes of a number, for formats of whole bytes."""
        return self.num_bits // 8

    @property
    def bits(self) -> type[np.unsignedinteger]:
        """The unsigned integer of a number's size, for formats of whole bytes."""
        return unsigned_type(self.num_bits)

    @property
    def inf(self) -> int:
        """The pattern of +inf, for formats that have one; larger magnitudes are NaN."""
        return ((1 << self.num_exponent_bits) - 1) << self.num_fraction_bits

    def magnitudes(self, raw: np.ndarray) -> np.ndarray:
        """Patterns without the sign: in the order of magnitudes, 0 for both zeros.

        Args:
            raw: numbers of a signed format, of any dtype, 1-d.
        """
        patterns: np.ndarray = raw.view(self.bits) & self.bits(magnitude_mask(self.num_bits))
        return patterns

    def is_zero(self, pattern: int) -> bool:
        """Whether the bits of one number are +0 or -0."""
        if self.specials is Specials.SCALE:
            return False
        if self.specials is Specials.FNUZ:
            return pattern == 0
        return pattern & magnitude_mask(self.num_bits) == 0

    def is_inf(self, pattern: int) -> bool:
        """Whether the bits of one number are an infinity of either sign."""
        magnitude = pattern & magnitude_mask(self.num_bits)
        return self.specials is Specials.IEEE and magnitude == self.inf

    def is_nan(self, pattern: int) -> bool:
        """Whether the bits of one number are a NaN."""
        magnitude = pattern & magnitude_mask(self.num_bits)
        if self.specials is Specials.IEEE:
            return magnitude > self.inf
        if self.specials is Specials.FN:
            return magnitude == magnitude_mask(self.num_bits)
        if self.specials is Specials.FNUZ:
            return pattern == 1 << (self.num_bits - 1)
        return self.specials is Specials.SCALE and pattern == (1 << self.num_bits) - 1


@functools.cache
def unsigned_type(num_bits: int) -> type[np.unsignedinteger]:
    """numpy's unsigned integer of 8, 16, 32 or 64 bits."""
    import numpy as np

    types: dict[int, type[np.unsignedinteger]] = {
        8: np.uint8,
        16: np.uint16,
        32: np.uint32,
        64: np.uint64,
    }
    return types[num_bits]


def magnitude_mask(num_bits: int) -> int:
    """The bits of a number below its sign."""
    return (1 << (num_bits - 1)) - 1


def _by_name(*formats: FloatFormat) -> dict[str, FloatFormat]:
    return {form.name: form for form in formats}


# The formats that can be ranked, masked and compared: those of 16 bits and more.
PLAIN_FLOATS = _by_name(
    FloatFormat("BF16", "bfloat16", 8, 7),
    FloatFormat("F16", "float16", 5, 10),
    FloatFormat("F32", "float32", 8, 23),
    FloatFormat("F64", "float64", 11, 52),
)
# The formats of 8 bits and fewer, which need a scale that is stored elsewhere.
NARROW_FLOATS = _by_name(
    FloatFormat("F8_E5M2", "float8_e5m2", 5, 2),
    FloatFormat("F8_E4M3", "float8_e4m3fn", 4, 3, Specials.FN),
    FloatFormat("F8_E5M2FNUZ", "float8_e5m2fnuz", 5, 2, Specials.FNUZ),
    FloatFormat("F8_E4M3FNUZ", "float8_e4m3fnuz", 4, 3, Specials.FNUZ),
    FloatFormat("F8_E8M0", "float8_e8m0fnu", 8, 0, Specials.SCALE),
    FloatFormat("F6_E2M3", "", 2, 3, Specials.FINITE),
    FloatFormat("F6_E3M2", "", 3, 2, Specials.FINITE),
    FloatFormat("F4", "", 2, 1, Specials.FINITE),
)
FLOATS = PLAIN_FLOATS | NARROW_FLOATS
# What else safetensors headers name: the torch dtype, and the bits of an element.
NOT_FLOATS = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "I8": ("int8", 8), "U16": ("uint16", 16),
    "I16": ("int16", 16), "U32": ("uint32", 32), "I32": ("int32", 32), "U64": ("uint64", 64),
    "I64": ("int64", 64), "C64": ("complex64", 64),
}  # fmt: skip
TORCH_NAMES = {name: torch_name for name, (torch_name, _) in NOT_FLOATS.items()} | {
    form.name: form.torch_name for form in FLOATS.values() if form.torch_name
}
