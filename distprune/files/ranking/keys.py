"""Stored numbers as keys: integers in the order of their scores.

The keys are those of ``selection.keys``: magnitude bits, or a hash of the index. The keys of all
tensors that are ranked together have one width: 16 bits if all are bf16, or all fp16; 32 if fp16,
bf16 and fp32 mix; 64 with fp64, and for hashes. Widening is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from distprune._common.float_formats import PLAIN_FLOATS, magnitude_mask, unsigned_type
from distprune._common.hashing import draw_seed, hash_in_place
from distprune._common.memory import Scratch

Array = np.ndarray

# Indices that are hashed at a time: they stay in the cache.
_HASHED = 1 << 14


@dataclass(frozen=True)
class KeyFormat:
    """The format of keys that are ranked together.

    Attributes:
        width: bits of a key, the highest of which is 0.
        value_dtype: the format whose magnitude bits the keys are; "" for hashes.
    """

    width: int
    value_dtype: str

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        return unsigned_type(self.width)

    @property
    def largest_number(self) -> int:
        """The key of inf; a larger one is that of a NaN."""
        if not self.value_dtype:
            return magnitude_mask(self.width)
        return PLAIN_FLOATS[self.value_dtype].inf

    def count_nan(self, keys: Array) -> int:
        """How many of the keys are those of NaN."""
        if not self.value_dtype:
            return 0
        return int(np.count_nonzero(keys > keys.dtype.type(self.largest_number)))

    def magnitude_of(self, key: int) -> float | None:
        """The magnitude that a key stands for; None for hashes."""
        if not self.value_dtype:
            return None
        if self.value_dtype == "BF16":
            return float(np.uint32(key << 16).view(np.float32))
        return float(self.dtype(key).view(f"f{self.width // 8}"))


HASHES = KeyFormat(64, "")


def key_format(dtypes: Iterable[str]) -> KeyFormat:
    """The narrowest format that holds the magnitudes of all these dtypes."""
    kinds = set(dtypes)
    if len(kinds) == 1:
        (kind,) = kinds
        return KeyFormat(PLAIN_FLOATS[kind].num_bits, kind)
    return KeyFormat(64, "F64") if "F64" in kinds else KeyFormat(32, "F32")


def bits_dtype(dtype: str) -> np.dtype:
    """The unsigned integer, little-endian, as which an element is read."""
    little_endian: np.dtype = np.dtype(PLAIN_FLOATS[dtype].bits).newbyteorder("<")
    return little_endian


def magnitude_keys(bits: Array, dtype: str, key_format: KeyFormat) -> Array:
    """Keys of stored elements; those of NaN are above ``key_format.largest_number``.

    Args:
        bits: of ``bits_dtype(dtype)``.
        dtype: of the elements.
        key_format: of the keys.
    """
    if dtype != key_format.value_dtype:
        bits = widened(bits, dtype, key_format.width)
    keys: Array = bits & key_format.dtype(magnitude_mask(key_format.width))
    return keys


def widened(bits: Array, dtype: str, width: int) -> Array:
    """The bits of the same numbers in a format that is as wide or wider."""
    if dtype == "BF16":
        bits = bits.astype(np.uint32) << np.uint32(16)
        dtype = "F32"
    if 8 * bits.itemsize == width:
        return bits
    # Not through arithmetic that could flush denormals: a conversion, and exact.
    with np.errstate(invalid="ignore"):
        wide = bits.view(f"f{bits.itemsize}").astype(f"f{width // 8}")
    return wide.view(unsigned_type(width))


def random_keys(first: int, last: int, seed: int) -> Array:
    """Hashes of the indices [first, last), by which ``RandomUnstructured`` ranks.

    Args:
        seed: as :func:`hash_seed` returns it.
    """
    keys = np.arange(first, last, dtype=np.int64)
    scratch = Scratch()
    for start in range(0, len(keys), _HASHED):
        hash_in_place(keys[start : start + _HASHED], seed, scratch)
    return keys.view(np.uint64)


def hash_seed(seed: int) -> int:
    """The seed of hashes that ``RandomUnstructured`` draws after ``torch.manual_seed(seed)``."""
    return int(draw_seed(torch.Generator().manual_seed(seed)))
