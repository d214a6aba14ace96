"""The functions that touch every element, by numpy; device.py has the same by torch operations.

numpy compares into bytes without a copy and without the interpreter's lock, so several threads can
visit chunks. torch's own threads would meet at a barrier after each of these short operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distprune.base.mask_values import bits_of_one, is_one
from distprune.base.memory import INTEGERS, SERIAL, Array, Scratch

# Keys and flags of a chunk stay in the cache. With smaller chunks, threads would wait more for the
# interpreter's lock.
CHUNK_BYTES = 3 << 19


def are_live(mask: Tensor, scratch: Scratch) -> Array:
    """bool [m]: where a mask is exactly 1."""
    return is_one(mask, out=scratch.array("live", mask.numel(), bool))


def count_pieces(flags: Array, bounds: Sequence[int]) -> list[int]:
    """How many flags are set between each bound and the next."""
    return [int(np.count_nonzero(flags[a:b])) for a, b in pairwise(bounds)]


def scan(
    keys: Tensor,
    live: Array | None,
    interval: tuple[int | Array, int | Array],
    pivots: Sequence[int | Array],
    above: int | None,
    bounds: Sequence[int],
    out: Tensor | None,
    scratch: Scratch,
    capacity: int | None = None,
) -> tuple[list[list[int]], Tensor, Tensor, Array]:
    """Count the live keys around an interval and pivots, and collect those inside.

    Args:
        keys: 1-d.
        live: which elements compete; None: all.
        interval: the lowest and the highest key to collect: numbers, or arrays like keys.
        pivots: keys to count up to, likewise.
        above: the NaN are the keys above this one; None: they are not counted.
        bounds: of the pieces that are counted apart.
        out: a bool mask that the last result is written to, if it can be.
        scratch: memory to use again.
        capacity: how many elements a device may collect without waiting for their number; it is
            not used here.

    Returns:
        Lists of numbers per piece: keys below the interval, inside, NaN, and up to each pivot;
        positions, int32, and keys of those inside; and bool, like keys: what is not below.
    """
    numbers = keys.numpy()
    size, integer = numbers.size, numbers.dtype.type

    def typed(key: int | Array) -> Any:
        return key if isinstance(key, np.ndarray) else integer(key)

    low, high = interval
    stay = scratch.array("stay", size, bool) if out is None else out.numpy()
    np.greater_equal(numbers, typed(low), out=stay)
    inside = np.less_equal(numbers, typed(high), out=scratch.array("inside", size, bool))
    inside &= stay
    if live is not None:
        inside &= live
        np.greater_equal(stay, live, out=stay)  # what does not compete stays
    sizes = [b - a for a, b in pairwise(bounds)]
    num_below = [n - kept for n, kept in zip(sizes, count_pieces(stay, bounds), strict=True)]
    positions = np.flatnonzero(inside)
    num_inside = (
        [positions.size]
        if len(sizes) == 1
        else np.diff(np.searchsorted(positions, bounds)).tolist()
    )
    rows = [num_below, num_inside]
    for pivot, is_above in [(above, True), *((pivot, False) for pivot in pivots)]:
        if pivot is None:
            rows.append([0] * len(sizes))
            continue
        compare = np.greater if is_above else np.less_equal
        flags = compare(numbers, typed(pivot), out=scratch.array("flags", size, bool))
        if live is not None:
            flags &= live
        rows.append(count_pieces(flags, bounds))
    found = torch.from_numpy(numbers[positions])
    return rows, torch.from_numpy(positions.astype(np.int32)), found, stay


def kept(keys: Tensor, live: Array | None, first: int | Array, scratch: Scratch) -> Array:
    """bool, like keys: what is pruned already, and the keys from ``first`` on."""
    numbers = keys.numpy()
    lowest = first if isinstance(first, np.ndarray) else numbers.dtype.type(first)
    stay: Array = np.greater_equal(numbers, lowest, out=scratch.array("stay", numbers.size, bool))
    if live is not None:
        np.greater_equal(stay, live, out=stay)
    return stay


def positions_of(keys: Tensor, key: int) -> Tensor:
    """int64 [m]: where a key is."""
    numbers = keys.numpy()
    return torch.from_numpy(np.flatnonzero(numbers == numbers.dtype.type(key)))


def clear(flags: Array, positions: Tensor) -> None:
    """Set flags to False at some positions."""
    flags[positions.numpy()] = False


def store(out: Tensor, previous: Tensor | None, stay: Array) -> None:
    """Write a chunk of a mask: 0 where not ``stay``; elsewhere the previous value, or 1."""
    if previous is not None and (previous.dtype != out.dtype or out.itemsize not in INTEGERS):
        # Seldom: masks of another dtype came from importance scores of another dtype.
        flags = torch.from_numpy(stay)
        for start in range(0, out.numel(), SERIAL):
            rows = slice(start, start + SERIAL)
            out[rows] = previous[rows].to(out.dtype) * flags[rows]
    elif out.dtype is torch.float32 and previous is None:
        np.copyto(out.numpy(), stay)
    elif out.itemsize not in INTEGERS:
        out.copy_(torch.from_numpy(stay))
    else:
        bits = out.view(INTEGERS[out.itemsize]).numpy()
        if previous is None:
            np.multiply(stay, bits_of_one(out.dtype), out=bits)
        else:
            np.multiply(previous.view(INTEGERS[out.itemsize]).numpy(), stay, out=bits)


def zero(out: Tensor, positions: Tensor, flags: Array) -> int:
    """Zero some elements of a chunk of a mask, where a flag is set; how many.

    Args:
        out: the chunk.
        positions: of elements that are 1 there.
        flags: bool, like positions.
    """
    gone = positions.numpy()[flags]
    if out.itemsize in INTEGERS:
        out.view(INTEGERS[out.itemsize]).numpy()[gone] = 0
    else:
        out[torch.from_numpy(gone).long()] = 0
    return int(gone.size)
