"""Stored numbers as keys: integers in the order of their scores.

The keys are those of ``selection.keys``: magnitude bits, or a hash of the index. The keys of all
tensors that are ranked together have one width: 16 bits if all are bf16, or all fp16; 32 if fp16,
bf16 and fp32 mix; 64 with fp64, and for hashes. Widening is exact. A pass over the keys counts 16
of their bits.
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

# Shorter rows are not partitioned: to compare all pairs is five times as fast.
_FEW = 16
# Bits of a key that one pass over the keys decides.
_DIGIT = 16
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
    return np.dtype(PLAIN_FLOATS[dtype].bits).newbyteorder("<")


def magnitude_keys(bits: Array, dtype: str, key_format: KeyFormat) -> Array:
    """Keys of stored elements; those of NaN are above ``key_format.largest_number``.

    Args:
        bits: of ``bits_dtype(dtype)``.
        dtype: of the elements.
        key_format: of the keys.
    """
    if dtype != key_format.value_dtype:
        bits = _widened(bits, dtype, key_format.width)
    keys: Array = bits & key_format.dtype(magnitude_mask(key_format.width))
    return keys


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
    num_missing = k - np.count_nonzero(lowest, axis=1, keepdims=True)
    if not np.array_equal(num_missing, np.count_nonzero(ties, axis=1, keepdims=True)):
        ties &= np.cumsum(ties, axis=1, dtype=np.int32) <= num_missing
    lowest |= ties
    return lowest


def _lowest_of_few(keys: Array, k: int) -> Array:
    """:func:`lowest_in_rows` by comparing all pairs of a row, in all rows at once."""
    columns = np.ascontiguousarray(keys.T)
    num_earlier = np.zeros(columns.shape, dtype=np.uint8)
    for left in range(len(columns)):
        for right in range(left + 1, len(columns)):
            is_lower = columns[right] < columns[left]
            num_earlier[left] += is_lower
            num_earlier[right] += ~is_lower
    return np.ascontiguousarray((num_earlier < k).T)


def descent_to(width: int, k: int) -> Descent:
    """The descent to the k-th lowest key of ``width`` bits, sixteen of them in every pass.

    The highest bit of a key is 0: the first histogram has 2**15 bins, the others 2**16.
    """
    return Descent(0, magnitude_mask(width), k - 1, _DIGIT, width - _DIGIT)


def key_histogram(keys: Array, descent: Descent) -> Array:
    """int64 [descent.num_bins]: the histogram of the keys in the interval of a descent."""
    return digit_histogram(keys, descent.low >> (descent.shift + _DIGIT), descent.shift)


def digit_histogram(keys: Array, prefix: int, shift: int) -> Array:
    """Count the keys with a prefix by their next sixteen bits::

        key    | prefix | sixteen bits | shift bits |

    Args:
        keys: 1-d.
        prefix: the bits above; keys with another prefix are not counted. 0 if there are none.
        shift: the number of bits below.

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
    histogram: Array = torch.bincount(torch.from_numpy(digits), minlength=num_bins).numpy()
    return histogram


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
    """A cut of the total order: it prunes smaller keys, and the first ``num_ties`` equal ones.

    Pass the elements to :meth:`lowest` in their order.
    """

    def __init__(self, key: int, num_ties: int) -> None:
        self.key = key
        self.num_ties = num_ties

    def lowest(self, keys: Array) -> Array:
        """bool, like keys, 1-d: which of the next elements are pruned."""
        key = keys.dtype.type(self.key)
        lowest: Array = keys < key
        if self.num_ties:
            ties = np.flatnonzero(keys == key)[: self.num_ties]
            lowest[ties] = True
            self.num_ties -= len(ties)
        return lowest
