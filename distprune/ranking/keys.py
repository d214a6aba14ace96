"""Scores as integers of the same order, so that ranking is exact on every device.

[Note: keys] The bits of a non-negative IEEE number, read as an integer, are in
the order of the numbers. So |x| becomes a key by clearing the sign bit: -0.0
equals 0.0, denormals stay distinct whatever the flush-to-zero mode, and inf is
the largest number. All NaN share one key above inf, where torch.topk has them.
Ranking compares keys as integers, and makes no other comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.memory import INTEGERS, LARGEST_HASH, Array, Scratch
from distprune.base.selecting import PLAIN_FLOATS, FloatFormat


class Order(Enum):
    """Which elements rank first, that is, are pruned first."""

    MAGNITUDE = "smallest |score| first"
    ASCENDING = "smallest score first"
    DESCENDING = "largest score first"


_FLOATS: dict[torch.dtype, FloatFormat] = {
    getattr(torch, form.torch_name): form for form in PLAIN_FLOATS.values()
}
# Integers are widened first where |min| would overflow.
_INTEGERS = {
    torch.bool: torch.int16,
    torch.uint8: torch.int16,
    torch.int8: torch.int16,
    torch.int16: torch.int32,
    torch.int32: torch.int64,
    torch.int64: torch.int64,
}


@dataclass(frozen=True)
class KeyRange:
    """The integers that the keys of one call lie in.

    Attributes:
        dtype: of the keys.
        low, high: smallest and largest key, NaN's included.
        largest_number: the largest key that is not NaN's.
        value_dtype: of the scores, to show a key as a score.
        order: of the scores.
    """

    dtype: torch.dtype
    low: int
    high: int
    largest_number: int
    value_dtype: torch.dtype
    order: Order

    @property
    def is_float(self) -> bool:
        """Whether scores can be NaN."""
        return self.high > self.largest_number

    def score_of(self, key: int) -> float:
        """The score that a key stands for (|score| under Order.MAGNITUDE)."""
        if not self.is_float:
            return float(-key if self.order is Order.DESCENDING else key)
        if key > self.largest_number:
            return float("nan")
        magnitude = torch.tensor(abs(key), dtype=self.dtype).view(self.value_dtype).item()
        negative = key > 0 if self.order is Order.DESCENDING else key < 0
        return -magnitude if negative and key != 0 else magnitude


RANDOM_KEYS = KeyRange(torch.int64, 0, LARGEST_HASH, LARGEST_HASH, torch.int64, Order.ASCENDING)


def key_range(dtype: torch.dtype, order: Order) -> KeyRange:
    """The keys of scores of a dtype.

    Raises:
        NotImplementedError: a dtype that has no order here (complex, float8, quantised).
    """
    if dtype in _FLOATS:
        key_dtype, inf = INTEGERS[dtype.itemsize], _FLOATS[dtype].inf
        low = 0 if order is Order.MAGNITUDE else -inf
        return KeyRange(key_dtype, low, inf + 1, inf, dtype, order)
    if dtype in _INTEGERS:
        key_dtype = _INTEGERS[dtype]
        # int64 has no wider type: |min| stays negative there, as in torch.abs.
        bound = torch.iinfo(key_dtype).max - 1
        return KeyRange(key_dtype, -bound, bound, bound, dtype, order)
    supported = ", ".join(str(rankable) for rankable in (*_FLOATS, *_INTEGERS))
    raise NotImplementedError(
        f"scores of dtype {dtype} cannot be ranked; expected one of {supported}. "
        "Pass importance_scores of one of these."
    )


class Keys(NamedTuple):
    """Keys of some elements.

    Attributes:
        values: 1-d, of the dtype of their range; valid until the same scratch is used again.
        may_have_nan: False if none of them is NaN's.
    """

    values: Tensor
    may_have_nan: bool


def to_keys(scores: Tensor, common: KeyRange, scratch: Scratch | None = None) -> Keys:
    """Keys of scores, 1-d: see [Note: keys]. In scratch memory, if there is some."""
    if common is RANDOM_KEYS:
        return Keys(scores, False)
    if not common.is_float:
        keys = scores.to(common.dtype, copy=True)
        if common.order is Order.MAGNITUDE:
            keys.abs_()
        elif common.order is Order.DESCENDING:
            keys.neg_()
        return Keys(keys, False)
    bits = scores.to(common.value_dtype).contiguous().view(common.dtype)
    if memory.takes_numpy(bits.device):
        return _float_keys(bits.numpy(), common, scratch or Scratch())
    keys = torch.bitwise_and(bits, torch.iinfo(common.dtype).max).clamp_(max=common.high)
    if common.order is not Order.MAGNITUDE:
        negative = bits < 0 if common.order is Order.ASCENDING else bits > 0
        keys = torch.where(negative & (keys <= common.largest_number), -keys, keys)
    return Keys(keys, True)


def _float_keys(bits: Array, common: KeyRange, scratch: Scratch) -> Keys:
    """The same operations by numpy, which has no OpenMP barrier per small call."""
    integer = bits.dtype.type
    negative = None
    if common.order is not Order.MAGNITUDE:
        negative = bits < 0 if common.order is Order.ASCENDING else bits > 0
    # Scores that were computed lie in the same memory.
    keys = scratch.array("keys", bits.size, bits.dtype)
    np.bitwise_and(bits, integer((1 << (8 * bits.itemsize - 1)) - 1), out=keys)
    has_nan = int(keys.max(initial=0)) > common.largest_number
    if has_nan:  # seldom: finding out takes less time than clamping all
        np.minimum(keys, integer(common.high), out=keys)
    if negative is not None:
        np.negative(keys, out=keys, where=negative & (keys <= integer(common.largest_number)))
    return Keys(torch.from_numpy(keys), has_nan)
