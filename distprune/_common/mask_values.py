"""Where the elements of a mask on the CPU are 0 or 1, by numpy.

Two dtypes need care. A bool mask that was read from a file may hold true bytes other than 1, and
numpy has no bfloat16. torch's comparisons of bytes take twenty times as long.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from distprune._common.memory import INTEGERS, Array


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


def bits_of_one(dtype: torch.dtype) -> np.integer[Any]:
    """The bits of 1 in a dtype, as an integer of its size."""
    ones = torch.ones(1, dtype=dtype).view(INTEGERS[dtype.itemsize]).numpy()
    one: np.integer[Any] = ones[0]
    return one
