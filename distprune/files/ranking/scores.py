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
from distprune._common.radix import Descent, RankOutsideError
from distprune.files.errors import CheckpointError

Array = np.ndarray

# Rows of so few keys are not partitioned: all pairs are compared, five times as fast.
_FEW = 16
# Bits of a key that one pass over the keys decides.
_DIGIT = 16
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


def descent_to(width: int, k: int) -> Descent:
    """The descent to the k-th lowest key of ``width`` bits, sixteen of them in every pass.

    The highest bit of a key is 0: the first histogram has 2**15 bins, the others 2**16.
    """
    return Descent(0, magnitude_mask(width), k - 1, _DIGIT, width - _DIGIT)


def key_histogram(keys: Array, descent: Descent) -> Array:
    """int64 [descent.num_bins]: the histogram of the keys in the interval of a descent."""
    return digit_histogram(keys, descent.low >> (descent.shift + _DIGIT), descent.shift)


def digit_histogram(keys: Array, prefix: int, shift: int) -> Array:
    """How many keys have which sixteen bits at a place.

    Args:
        keys: 1-d.
        prefix: the bits above, of the keys that are counted; 0 if there are none above.
        shift: how many bits are below.

    Returns:
        int64 [2**16]; [2**15] without bits above, as the highest bit of a key is 0.
    """
    above = shift + _DIGIT
    is_first = above == 8 * keys.itemsize
    if not is_first:
        keys = keys[(keys >> keys.dtype.type(above)) == keys.dtype.type(prefix)]
    if shift:
        keys = keys >> keys.dtype.type(shift)
    digits = keys.astype(np.uint16, copy=False)
    digits = digits.view(np.int16) if is_first else digits.astype(np.int32)
    num_bins = 1 << (_DIGIT - is_first)
    return torch.bincount(torch.from_numpy(digits), minlength=num_bins).numpy()


def narrowed(descent: Descent, histogram: Array) -> tuple[Descent, int]:
    """The descent in the bin that holds its key, and the number of that bin.

    Raises:
        CheckpointError: the keys are not those of the pass before.
    """
    try:
        return descent.narrowed(histogram)
    except RankOutsideError:
        raise CheckpointError(
            "The weights changed while they were read: the counts of two passes differ. Expected "
            "files that nothing writes to; run the command again when they are complete."
        ) from None


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
