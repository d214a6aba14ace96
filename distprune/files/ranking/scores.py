"""Stored numbers as integers in the order of their scores, 16 bits of which are counted at a time.

The keys are those of selection.keys: magnitude bits, or a hash of the index. Keys of all tensors
that are ranked together have one width: 16 bits if all are bf16, or all fp16; 32 if fp16, bf16 and
fp32 mix; 64 with fp64 and for hashes. Widening is exact.
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

# Rows of so few keys are not partitioned: all pairs are compared, five times as fast.
_FEW = 16
# Hashed at a time: stays in the cache, and too few for torch to wait for its other threads.
_HASHED = 1 << 14


@dataclass(frozen=True)
class KeyFormat:
    """The keys of everything that is ranked together.

    Attributes:
        width: bits of a key, the highest of which is 0.
        value_dtype: what the keys are magnitude bits of; "" for hashes.
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
    """The unsigned integer, little-endian, that an element is read as."""
    return np.dtype(PLAIN_FLOATS[dtype].bits).newbyteorder("<")


def magnitude_keys(bits: Array, dtype: str, wanted: KeyFormat) -> Array:
    """Keys of stored elements; NaN are above ``wanted.largest_number``.

    Args:
        bits: as ``bits_dtype(dtype)``.
    """
    own = 8 * bits.itemsize
    if dtype != wanted.value_dtype:
        bits = _widened(bits, dtype, wanted.width)
        own = wanted.width
    return bits & unsigned_type(own)(magnitude_mask(own))


def _widened(bits: Array, dtype: str, width: int) -> Array:
    """The bits of the same numbers in a wider format."""
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


def lowest_in_rows(keys: Array, k: int) -> Array:
    """The k lowest keys of every row; among equal ones those further left.

    Args:
        keys: [rows, n].

    Returns:
        bool [rows, n], k of them True in each row.
    """
    if k == 0:
        return np.zeros(keys.shape, dtype=bool)
    if k == keys.shape[1]:
        return np.ones(keys.shape, dtype=bool)
    if keys.shape[1] <= _FEW:
        return _lowest_of_few(keys, k)
    threshold = np.partition(keys, k - 1, axis=1)[:, k - 1 : k]
    lowest = keys < threshold
    ties = keys == threshold
    wanted = k - np.count_nonzero(lowest, axis=1, keepdims=True)
    if not np.array_equal(wanted, np.count_nonzero(ties, axis=1, keepdims=True)):
        ties &= np.cumsum(ties, axis=1, dtype=np.int32) <= wanted
    return lowest | ties


def _lowest_of_few(keys: Array, k: int) -> Array:
    """:func:`lowest_in_rows` by comparing all pairs of a row, in all rows at once."""
    columns = np.ascontiguousarray(keys.T)
    num_before = np.zeros(columns.shape, dtype=np.uint8)
    for left in range(len(columns)):
        for right in range(left + 1, len(columns)):
            is_lower = columns[right] < columns[left]
            num_before[left] += is_lower
            num_before[right] += ~is_lower
    return np.ascontiguousarray((num_before < k).T)


def digit_histogram(keys: Array, prefix: int | None, shift: int) -> Array:
    """How many keys have which sixteen bits at a place.

    Args:
        keys: 1-d.
        prefix: the bits above, of the keys that are counted; None: there are none above.
        shift: how many bits are below.

    Returns:
        int64 [2**16]; [2**15] without bits above, as the highest bit of a key is 0.
    """
    if prefix is not None:
        above = keys.dtype.type(shift + 16)
        keys = keys[(keys >> above) == keys.dtype.type(prefix)]
    if shift:
        keys = keys >> keys.dtype.type(shift)
    digits = keys.astype(np.uint16, copy=False)
    digits = digits.view(np.int16) if prefix is None else digits.astype(np.int32)
    num_bins = 1 << 15 if prefix is None else 1 << 16
    return torch.bincount(torch.from_numpy(digits), minlength=num_bins).numpy()


class Descent:
    """The search for the k-th lowest key, sixteen bits at a time: radix selection.

    Ask for :meth:`histogram` of all keys, sum them over all that are ranked together, and
    :meth:`narrow`; again, until ``is_done``.

    Attributes:
        prefix: the bits of the k-th key that are known; in the end the whole key.
        rank: how many keys with that prefix come before the k-th.
    """

    def __init__(self, width: int, k: int) -> None:
        self.prefix = 0
        self.rank = k - 1
        self._shift = width - 16
        self._width = width

    @property
    def is_done(self) -> bool:
        return self._shift < 0

    @property
    def is_first(self) -> bool:
        return self._shift == self._width - 16

    @property
    def is_last(self) -> bool:
        return self._shift == 0

    @property
    def num_bins(self) -> int:
        return 1 << 15 if self.is_first else 1 << 16

    def histogram(self, keys: Array) -> Array:
        """int64 [num_bins]: how many keys with the prefix have which next sixteen bits."""
        return digit_histogram(keys, None if self.is_first else self.prefix, self._shift)

    def narrow(self, histogram: Array) -> int:
        """Fix the next sixteen bits; returns them."""
        upto = np.cumsum(histogram)
        digit = int(np.searchsorted(upto, self.rank, side="right"))
        if digit:
            self.rank -= int(upto[digit - 1])
        self.prefix = (self.prefix << 16) | digit
        self._shift -= 16
        return digit


class Threshold:
    """A cut of the total order: keys below it go, and the first ``num_ties`` of the equal ones.

    Elements have to be shown in their order.
    """

    def __init__(self, key: int, num_ties: int) -> None:
        self.key = key
        self.num_ties = num_ties

    def lowest(self, keys: Array) -> Array:
        """bool, like keys, 1-d: which of the next elements go."""
        key = keys.dtype.type(self.key)
        lowest = keys < key
        if self.num_ties:
            places = np.flatnonzero(keys == key)[: self.num_ties]
            lowest[places] = True
            self.num_ties -= len(places)
        return lowest
