"""Masks by numpy: where their elements are 0 or 1, and their product with values.

Two dtypes need care. A bool mask that was read from a file may hold true bytes other than 1, and
numpy has no bfloat16. torch's comparisons of bytes take twenty times as long.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distprune.base.memory import INTEGERS, Array


def is_zero(mask: Tensor) -> Array:
    """bool, of the mask's shape: where it is +0 or -0."""
    if mask.dtype is torch.bool:
        numbers = mask.view(torch.uint8).numpy()
    elif mask.dtype is torch.bfloat16:
        numbers = mask.view(torch.int16).numpy() << 1  # shifts the sign out
    else:
        numbers = mask.numpy()
    flags: Array = numbers == 0
    return flags


def is_one(mask: Tensor, out: Array | None = None) -> Array:
    """bool, of the mask's shape: where it is exactly 1, or true.

    Args:
        out: bool, where to write it.
    """
    flags: Array
    if mask.dtype is torch.bool:
        flags = np.not_equal(mask.view(torch.uint8).numpy(), 0, out=out)
    elif mask.itemsize not in INTEGERS:
        flags = np.equal(mask.numpy(), 1, out=out)
    else:
        bits = mask.view(INTEGERS[mask.itemsize]).numpy()
        flags = np.equal(bits, bits_of_one(mask.dtype), out=out)
    return flags


@functools.cache
def bits_of_one(dtype: torch.dtype) -> np.integer[Any]:
    """The bits of 1 in a dtype, as an integer of its size."""
    ones = torch.ones(1, dtype=dtype).view(INTEGERS[dtype.itemsize]).numpy()
    one: np.integer[Any] = ones[0]
    return one


def zero_pruned(values: Tensor, mask: Tensor) -> None:
    """Write +0, in place, wherever a mask is 0: also over -0.0, inf and NaN.

    Args:
        values: of any dtype; no other tensor is to see the change.
        mask: of any dtype, of the same shape, on the same device.

    Cost: on the CPU a multiplication of the bits by 0 or 1; torch's masked_fill_ branches at every
    element, and takes 5 to 20 times as long where zeros are scattered.
    """
    if values.device.type != "cpu" or values.itemsize not in INTEGERS:
        values.masked_fill_(mask.logical_not(), 0)
        return
    keep = is_zero(mask)
    np.logical_not(keep, out=keep)
    bits = values.view(INTEGERS[values.itemsize]).numpy()
    np.multiply(bits, keep, out=bits)


# 1 MiB of float32: the temporaries of a chunk stay in a core's cache.
_CHUNK = 1 << 18
# For fewer elements, torch's product takes less time than the calls of the chunked one.
_SMALL = 1 << 14


def write_product(values: Tensor, mask: Tensor, out: Tensor) -> None:
    """Write ``values * mask``, rounded to the dtype of ``out``, into ``out``.

    A product, not a selection: pruned elements keep their sign (-0.0), and inf becomes NaN, as in
    the product that one process computes. The bits are those of ``(values * mask).to(out.dtype)``.

    Args:
        values: of any dtype.
        mask: bool, of the same shape, on the same device.
        out: of the same shape; may be ``values``.

    Cost: on the CPU a pass over the memory, 0.3 to 0.6 ns per element, and some chunks of
    temporaries; torch's product with a bool tensor takes three times as long, and makes a float
    copy of the mask. On other devices that product is one kernel, and it is used.
    """
    if values.device.type != "cpu" or values.numel() < _SMALL:
        torch.mul(values, mask, out=out)
        return
    num_rows = max(1, _CHUNK * len(values) // max(1, values.numel()))
    for first in range(0, len(values), num_rows):
        rows = slice(first, first + num_rows)
        # torch converts bytes to floats four times as fast as bools. True that was read from a
        # file may be any byte but 0.
        keep = mask[rows].view(torch.uint8).clamp(max=1).to(values.dtype)
        torch.mul(values[rows], keep, out=out[rows])
