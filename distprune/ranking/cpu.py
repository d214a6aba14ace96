"""The functions that touch every element, by numpy; device.py has the same by torch operations.

numpy compares into bytes without a copy and without the interpreter's lock, so several threads can
visit chunks. torch's own threads would meet at a barrier after each of these short operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from distprune.base.memory import INTEGERS, Array, Scratch, bits_of_one, is_one

# Keys and flags of a chunk stay in the cache. With smaller chunks, threads would wait more for the
# interpreter's lock.
CHUNK_BYTES = 3 << 19


def are_live(mask: Tensor, scratch: Scratch) -> Array:
    """bool [m]: where a mask is exactly 1."""
    return is_one(mask, out=scratch.array("live", mask.numel(), bool))


def count_pieces(flags: Array, bounds: Array) -> Array:
    """int64: how many flags are set between each bound and the next.

    Pieces have at least one element, and no more than fit into 16 bits, unless there is only one.
    """
    if len(bounds) == 2:
        return np.array([np.count_nonzero(flags)])
    # With 16 bits it takes a quarter of the time that it takes with 64.
    return np.add.reduceat(flags.view(np.uint8), bounds[:-1], dtype=np.uint16).astype(np.int64)


def scan(
    keys: Tensor,
    live: Array | None,
    edges: Sequence[int | Array],
    above: int | None,
    bounds: Array,
    scratch: Scratch,
    most: float,
) -> tuple[Array, Tensor, Tensor, Array]:
    """Count the live keys up to some edges, and collect those between the first two.

    Args:
        keys: 1-d.
        live: which elements compete; None: all.
        edges: ascending keys, at least two: numbers, or arrays like keys. Collected are the keys
            above the first and up to the second.
        above: the NaN are the keys above this one; None: they are not counted.
        bounds: of the pieces that are counted apart, as for :func:`count_pieces`.
        scratch: memory to use again.
        most: the fraction of the elements that a device may collect, and 1024 more, without waiting
            for their number; it is not used here.

    Returns:
        int64 [edges + 1, pieces]: keys up to each edge, and NaN; positions, int32, and keys of
        those collected; and bool, like keys: what is not below them.
    """
    numbers, size = keys.numpy(), keys.numel()
    counts = np.zeros((len(edges) + 1, len(bounds) - 1), dtype=np.int64)
    stay = np.greater(numbers, edges[0], out=scratch.array("stay", size, bool))
    inside = np.less_equal(numbers, edges[1], out=scratch.array("inside", size, bool))
    inside &= stay
    if live is not None:
        inside &= live
        np.greater_equal(stay, live, out=stay)  # what does not compete stays
    counts[0] = bounds[1:] - bounds[:-1] - count_pieces(stay, bounds)
    positions = inside.nonzero()[0]
    ends = positions.searchsorted(bounds)
    counts[1] = counts[0] + ends[1:] - ends[:-1]
    for row, edge in enumerate([*edges[2:], above], 2):
        if edge is None:
            continue
        compare = np.greater if row == len(edges) else np.less_equal
        flags = compare(numbers, edge, out=scratch.array("flags", size, bool))
        if live is not None:
            flags &= live
        counts[row] = count_pieces(flags, bounds)
    found = torch.from_numpy(numbers[positions])
    return counts, torch.from_numpy(positions.astype(np.int32)), found, stay


def kept(keys: Tensor, live: Array | None, first: int | Array, scratch: Scratch) -> Array:
    """bool, like keys: what is pruned already, and the keys from ``first`` on."""
    stay: Array = np.greater_equal(
        keys.numpy(), first, out=scratch.array("stay", keys.numel(), bool)
    )
    if live is not None:
        np.greater_equal(stay, live, out=stay)
    return stay


def positions_of(keys: Tensor, key: int | Array) -> Tensor:
    """int64 [m]: where keys are equal to a key, or to those of an array."""
    return torch.from_numpy((keys.numpy() == key).nonzero()[0])


def store(out: Tensor, previous: Tensor | None, stay: Array) -> None:
    """Write a chunk of a mask: 0 where not ``stay``; elsewhere the previous value, or 1."""
    if previous is not None and (previous.dtype != out.dtype or out.itemsize not in INTEGERS):
        # Seldom: masks of another dtype came from importance scores of another dtype.
        out.copy_(previous).mul_(torch.from_numpy(stay))
    elif previous is None and out.dtype is torch.float32:
        np.copyto(out.numpy(), stay)  # takes half the time of the product below
    elif out.itemsize not in INTEGERS:
        out.copy_(torch.from_numpy(stay))
    else:
        bits = out.view(INTEGERS[out.itemsize]).numpy()
        if previous is None:
            np.multiply(stay, bits_of_one(out.dtype), out=bits)
        else:
            np.multiply(previous.view(INTEGERS[out.itemsize]).numpy(), stay, out=bits)


def zero(out: Tensor, positions: Tensor, flags: Array) -> Array:
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
    return np.array([gone.size])
