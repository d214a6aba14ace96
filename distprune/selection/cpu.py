"""What is done to one chunk of one parameter on a CPU, by numpy.

numpy compares straight into bytes and holds no lock meanwhile, so that chunks can go to threads;
torch's own threads meet at a barrier after each of these short operations. device.py has the same
functions for other devices; it is the reference of this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from distprune._common.mask_values import bits_of_one, is_one
from distprune._common.memory import INTEGERS, SERIAL, Array, Places, Scratch
from distprune.selection.candidates import Candidates, ChunkScan, Cut, Found, Interval, are_bool


def count_live(live: Tensor, scratch: Scratch) -> int:
    """Elements of a chunk of a mask that are exactly 1."""
    return int(np.count_nonzero(_live(live, scratch)))


def scan(
    part: Candidates,
    span: range,
    pivots: Sequence[int],
    interval: Interval | None,
    out: Tensor | None,
    scratch: Scratch,
    capacity: int | None = None,
) -> ChunkScan:
    """Count the keys around pivots, and collect those in an interval.

    Args:
        part: where the chunk belongs.
        span: its flat positions, all of which this rank counts or none.
        pivots, interval: keys.
        out: flat mask of the whole part, uninitialised: the span of it becomes the mask in force
            with everything below the interval pruned. Needs an interval.
        scratch: memory to use again.
        capacity: how many elements a device may collect without waiting for their number; None:
            it waits, and collects all.
    """
    loaded = part.keys.load(span.start, span.stop, scratch)
    keys = loaded.values.numpy()
    size, integer = keys.size, keys.dtype.type
    live, num_live = None, size
    if part.live is not None:
        live = _live(part.live[span.start : span.stop], scratch)
        num_live = int(np.count_nonzero(live))
    counts: dict[int, int] = {}
    num_below, found = 0, None
    if interval is not None:
        low, high = interval
        target = None if out is None else out[span.start : span.stop]
        previous = None if part.live is None else part.live[span.start : span.stop]
        # A bool mask is what is compared into.
        in_place = target is not None and are_bool(target, previous)
        keep = target.numpy() if in_place else scratch.array("keep", size, bool)
        np.greater_equal(keys, integer(low), out=keep)
        if live is not None:
            keep &= live
        num_keep = int(np.count_nonzero(keep))
        inside = np.less_equal(keys, integer(high), out=scratch.array("inside", size, bool))
        inside &= keep
        positions = np.flatnonzero(inside)
        is_counted = span.start in part.counted
        found = Found(
            span,
            torch.from_numpy(positions.astype(np.int32)),
            torch.from_numpy(keys[positions]),
            is_counted,
            positions.size,
        )
        num_below = num_live - num_keep
        counts = {low - 1: num_below, high: num_below + positions.size}
        if target is not None and not in_place:
            stay = keep if live is None else np.equal(keep, live, out=keep)
            _store(target, previous, stay)
    for pivot in pivots:
        if pivot in counts:
            continue
        if loaded.highest <= pivot:
            counts[pivot] = num_live
            continue
        upto = np.less_equal(keys, integer(pivot), out=scratch.array("inside", size, bool))
        if live is not None:
            upto &= live
        counts[pivot] = int(np.count_nonzero(upto))
    return ChunkScan([counts[pivot] for pivot in pivots], num_below, found)


def write(
    part: Candidates,
    span: range,
    position: int,
    cut: Cut,
    out: Tensor,
    previous: Tensor | None,
    scratch: Scratch,
) -> int:
    """Write the mask of a chunk: what lies before the cut is pruned.

    Args:
        part, span, scratch: as for :func:`scan`.
        position: of the parameter in the list that was cut.
        out: flat mask of the whole part.
        previous: survivors keep its values; None: they become 1. It may be ``out``.

    Returns:
        How many live elements were pruned.
    """
    keys = part.keys.load(span.start, span.stop, scratch).values.numpy()
    threshold = keys.dtype.type(cut.threshold)
    target = out[span.start : span.stop]
    before = None if previous is None else previous[span.start : span.stop]
    stay = scratch.array("keep", keys.size, bool)
    if position < cut.parameter:
        np.greater(keys, threshold, out=stay)
    else:
        np.greater_equal(keys, threshold, out=stay)
    if position == cut.parameter and cut.index > 0:
        ties = np.flatnonzero(keys == threshold)
        indices = part.index(torch.from_numpy(ties + span.start)).numpy()
        stay[ties[indices < cut.index]] = False
    if part.live is not None:
        # What does not compete stays as it is.
        live = _live(part.live[span.start : span.stop], scratch)
        np.greater_equal(stay, live, out=stay)
    _store(target, before, stay)
    return keys.size - int(np.count_nonzero(stay))


def prune_found(part: Candidates, position: int, cut: Cut, found: Found, out: Tensor) -> int:
    """Prune, in a mask where they are 1, those of the found elements that come before the cut.

    Args:
        part, position, cut, out: as for :func:`write`.

    Returns:
        How many.
    """
    keys, positions = found.keys.numpy(), found.positions.numpy()
    threshold = keys.dtype.type(cut.threshold)
    before = keys <= threshold if position < cut.parameter else keys < threshold
    if position == cut.parameter and cut.index > 0:
        ties = np.flatnonzero(keys == threshold)
        local = positions[ties].astype(np.int64) + found.span.start
        before[ties] = part.index(torch.from_numpy(local)).numpy() < cut.index
    pruned = positions[before]
    target = out[found.span.start : found.span.stop]
    if out.itemsize in INTEGERS:
        target.view(INTEGERS[out.itemsize]).numpy()[pruned] = 0
    else:
        target[torch.from_numpy(pruned).long()] = 0
    return pruned.size


def positions_of(part: Candidates, span: range, key: int, scratch: Scratch) -> Tensor:
    """Flat positions, int64 [m], of the live elements of a chunk that have a key."""
    keys = part.keys.load(span.start, span.stop, scratch).values.numpy()
    equal = np.equal(keys, keys.dtype.type(key), out=scratch.array("keep", keys.size, bool))
    if part.live is not None:
        equal &= _live(part.live[span.start : span.stop], scratch)
    return torch.from_numpy(np.flatnonzero(equal)) + span.start


def gather(part: Candidates, places: Places, dead: int) -> Tensor:
    """Keys at some places, 1-d; ``dead`` where an element does not compete."""
    keys = part.keys.gather(places)
    if part.live is not None:
        live = places.of(part.live) == 1
        keys.numpy()[~live.numpy()] = dead
    return keys


def _live(live: Tensor, scratch: Scratch) -> Array:
    """bool [m]: where a chunk of a mask is exactly 1."""
    return is_one(live, out=scratch.array("live", live.numel(), bool))


def _store(out: Tensor, previous: Tensor | None, stay: Array) -> None:
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
