"""Masks by numpy: where their elements are 0 or 1, and zeros where they are 0.

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
    if mask.dtype is torch.bool:
        keep = mask.view(torch.uint8).numpy() != 0
    elif mask.dtype is torch.bfloat16:
        keep = (mask.view(torch.int16).numpy() << 1) != 0  # shifts the sign out
    else:
        keep = mask.numpy() != 0
    bits = values.view(INTEGERS[values.itemsize]).numpy()
    np.multiply(bits, keep, out=bits)
