"""Masks by numpy: as bits, where their elements are 0 or 1, and zeros where they are 0.

As bits, the first element is in the lowest bit of the first byte:

    elements   0 1 2 3 4 5 6 7 | 8 9 ...
    values     1 0 0 1 1 1 0 1 | 1 0 ...
    bytes        0b10111001    | 0b...01

This is the only bit order of the package, in files and on the wire.

As tensors, two dtypes need care. A bool mask that was read from a file may hold true bytes other
than 1, and numpy has no bfloat16. torch's comparisons of bytes take twenty times as long.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distprune.base.memory import INTEGERS, Array


def num_bytes_of(num_elements: int) -> int:
    """How many bytes the bits of so many elements fill."""
    return -(-num_elements // 8)


def pack(flags: Array) -> Array:
    """Flags as bits, along the last dimension.

    Args:
        flags: bool [..., n]; not 0 is 1.

    Returns:
        uint8 [..., ceil(n / 8)]; the bits after the last element are 0.
    """
    return np.packbits(flags, axis=-1, bitorder="little")


def unpack(packed: Array, start: int, stop: int) -> Array:
    """The flags [start, stop) of a mask.

    Args:
        packed: uint8, 1-d, as :func:`pack` returns it.
        start, stop: indices of elements.

    Returns:
        bool [stop - start].
    """
    return np.unpackbits(packed, count=stop, bitorder="little")[start:].view(bool)


def pack_words(flags: Array) -> Array:
    """Flags, 1-d, as int64 [ceil(n / 64)]: the first in the lowest bit of the first word.

    Words of ranks that set different bits can be summed: no bit carries into the next one.
    """
    words: Array = np.zeros(-(-flags.size // 64), dtype="<i8")
    words.view(np.uint8)[: num_bytes_of(flags.size)] = pack(flags)
    return words


def unpack_words(words: Array, num_elements: int) -> Array:
    """bool [num_elements] from what :func:`pack_words` returned."""
    return unpack(words.astype("<i8", copy=False).view("u1"), 0, num_elements)


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
        mask: of any dtype, of the same shape, on any device.

    Cost: on the CPU a multiplication of the bits by 0 or 1; torch's masked_fill_ branches at every
    element, and takes 5 to 20 times as long where zeros are scattered.
    """
    mask = mask.to(values.device)
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
