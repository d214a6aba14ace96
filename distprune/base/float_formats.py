"""The dtypes that safetensors headers name, and what the bits of floating-point numbers mean.

This is the only table of dtypes in the package. Everything is said in bit patterns, because numpy
has no bfloat16. Importing the table does not import numpy, so that commands that read headers alone
start quickly.

    F32   s eeeeeeee fffffffffffffffffffffff      s: sign, e: exponent, f: fraction
    BF16  s eeeeeeee fffffff
    F16   s eeeee ffffffffff
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class FloatFormat(NamedTuple):
    """How the bits of a number are used: the largest exponent is that of inf and NaN.

    Attributes:
        name: as safetensors headers spell it.
        torch_name: of the torch dtype.
        num_bits: of a number, the sign included.
        inf: the pattern of +inf; larger magnitudes are NaN.
    """

    name: str
    torch_name: str
    num_bits: int
    inf: int

    @property
    def num_bytes(self) -> int:
        """Bytes of a number."""
        return self.num_bits // 8

    @property
    def bits(self) -> type[np.unsignedinteger]:
        """The unsigned integer of a number's size."""
        import numpy as np

        return {2: np.uint16, 4: np.uint32, 8: np.uint64}[self.num_bytes]

    def magnitudes(self, raw: np.ndarray) -> np.ndarray:
        """Patterns without the sign: in the order of magnitudes, 0 for both zeros.

        Args:
            raw: numbers, of any dtype, 1-d.
        """
        patterns: np.ndarray = raw.view(self.bits) & self.bits((1 << (self.num_bits - 1)) - 1)
        return patterns


# The formats that can be ranked, masked and compared: those of 16 bits and more.
PLAIN_FLOATS = {
    form.name: form
    for form in (
        FloatFormat("BF16", "bfloat16", 16, 0x7F80),
        FloatFormat("F16", "float16", 16, 0x7C00),
        FloatFormat("F32", "float32", 32, 0x7F800000),
        FloatFormat("F64", "float64", 64, 0x7FF0000000000000),
    )
}
# The other dtypes: the name of torch's ("" if torch has none with one number per element), and the
# bits of an element. Floats of 8 bits and fewer need a scale that is stored elsewhere.
NARROW_FLOATS = {
    "F8_E5M2": ("float8_e5m2", 8), "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8), "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8), "F6_E2M3": ("", 6), "F6_E3M2": ("", 6), "F4": ("", 4),
}  # fmt: skip
NOT_FLOATS = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "I8": ("int8", 8), "U16": ("uint16", 16),
    "I16": ("int16", 16), "U32": ("uint32", 32), "I32": ("int32", 32), "U64": ("uint64", 64),
    "I64": ("int64", 64), "C64": ("complex64", 64),
}  # fmt: skip
_DTYPES = {form.name: (form.torch_name, form.num_bits) for form in PLAIN_FLOATS.values()}
_DTYPES |= NARROW_FLOATS | NOT_FLOATS
DTYPE_BITS = {name: num_bits for name, (_, num_bits) in _DTYPES.items()}
TORCH_NAMES = {name: torch_name for name, (torch_name, _) in _DTYPES.items() if torch_name}
