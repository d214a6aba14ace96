"""``kernels.Kernels`` on a CPU, by numpy; device.py is the reference of this module.

numpy compares into bytes without a copy and without the interpreter's lock, so several threads can
visit chunks. torch's own threads would meet at a barrier after each of these short operations.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from distprune._common.element_groups import Groups
from distprune._common.lowest_of_groups import lowest_of
from distprune._common.mask_values import bits_of_one, is_one
from distprune._common.memory import INTEGERS, SERIAL, Array, Count, Runs, Scratch
from distprune.selection.candidates import Candidates, ChunkScan, Collected, Cut, Interval, are_bool
from distprune.selection.keys import KeyRange

# Keys and flags of a chunk stay in the cache. With smaller chunks, threads would wait more for the
# interpreter's lock.
CHUNK_BYTES = 3 << 19
USES_THREADS = True


def count_live(live: Tensor, scratch: Scratch) -> int:
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
    loaded = part.keys.load(span.start, span.stop, scratch)
    keys = loaded.values.numpy()
    size, integer = keys.size, keys.dtype.type
    live, num_live = None, size
    if part.live is not None:
        live = _live(part.live[span.start : span.stop], scratch)
        num_live = int(np.count_nonzero(live))
    counts: dict[int, int] = {}
    num_below, collected = 0, None
    if interval is not None:
        low, high = interval
        target = None if out is None else out[span.start : span.stop]
        previous = None if part.live is None else part.live[span.start : span.stop]
        # The comparison writes a bool mask itself.
        in_place = target is not None and are_bool(target, previous)
        keep: Array
        if target is not None and in_place:
            keep = target.numpy()
        else:
            keep = scratch.array("keep", size, bool)
        np.greater_equal(keys, integer(low), out=keep)
        if live is not None:
            keep &= live
        num_keep = int(np.count_nonzero(keep))
        inside = np.less_equal(keys, integer(high), out=scratch.array("inside", size, bool))
        inside &= keep
        positions = np.flatnonzero(inside)
        collected = Collected(
            span,
            torch.from_numpy(positions.astype(np.int32)),
            torch.from_numpy(keys[positions]),
            span.start in part.counted,
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
    return ChunkScan([counts[pivot] for pivot in pivots], num_below, collected)


def write(
    part: Candidates,
    span: range,
    position: int,
    cut: Cut,
    out: Tensor,
    previous: Tensor | None,
    scratch: Scratch,
) -> int:
    stay = kept_at(part, span, position, cut, scratch)
    target = out[span.start : span.stop]
    earlier = None if previous is None else previous[span.start : span.stop]
    _store(target, earlier, stay)
    return stay.size - int(np.count_nonzero(stay))


def kept_at(part: Candidates, span: range, position: int, cut: Cut, scratch: Scratch) -> Array:
    """bool, 1-d: which elements of a chunk stay as they are; what does not compete does, too."""
    keys = part.keys.load(span.start, span.stop, scratch).values.numpy()
    threshold = keys.dtype.type(cut.threshold)
    stay: Array = scratch.array("keep", keys.size, bool)
    # Up to here all ties are pruned.
    end = keys.size if position < cut.parameter else 0
    if position == cut.parameter and cut.index > 0 and part.index.is_ascending:
        end = min(max(part.index.position_of(cut.index) - span.start, 0), keys.size)
    np.greater(keys[:end], threshold, out=stay[:end])
    np.greater_equal(keys[end:], threshold, out=stay[end:])
    if position == cut.parameter and cut.index > 0 and not part.index.is_ascending:
        ties = np.flatnonzero(keys == threshold)
        indices = part.index(torch.from_numpy(ties + span.start)).numpy()
        stay[ties[indices < cut.index]] = False
    if part.live is not None:
        # What does not compete stays as it is.
        live = _live(part.live[span.start : span.stop], scratch)
        np.greater_equal(stay, live, out=stay)
    return stay


def prune_collected(
    part: Candidates, position: int, cut: Cut, collected: Collected, out: Tensor
) -> int:
    keys, positions = collected.keys.numpy(), collected.positions.numpy()
    threshold = keys.dtype.type(cut.threshold)
    is_before = keys <= threshold if position < cut.parameter else keys < threshold
    if position == cut.parameter and cut.index > 0:
        ties = np.flatnonzero(keys == threshold)
        local = positions[ties].astype(np.int64) + collected.span.start
        is_before[ties] = part.index(torch.from_numpy(local)).numpy() < cut.index
    pruned = positions[is_before]
    target = out[collected.span.start : collected.span.stop]
    if out.itemsize in INTEGERS:
        target.view(INTEGERS[out.itemsize]).numpy()[pruned] = 0
    else:
        target[torch.from_numpy(pruned).long()] = 0
    return int(pruned.size)


def write_lowest(
    part: Candidates,
    span: range,
    groups: Groups,
    keys: KeyRange,
    out: Tensor,
    scratch: Scratch,
) -> tuple[Count, Count]:
    loaded = part.keys.load(span.start, span.stop, scratch)
    numbers = loaded.values.numpy()
    live, previous = None, None
    if part.live is not None:
        previous = part.live[span.start : span.stop]
        live = _live(previous, scratch)
        _lower(numbers, live, keys.low - 1, scratch)
    counted = part.counted_in(span)
    num_nan = 0
    if keys.is_float and loaded.highest > keys.largest_number:
        num_nan = int(np.count_nonzero(numbers[counted] > keys.largest_number))
    lowest = lowest_of(groups, numbers, scratch)
    if live is not None:
        lowest &= live
    num_pruned = int(np.count_nonzero(lowest[counted]))
    _store(out[span.start : span.stop], previous, np.logical_not(lowest, out=lowest))
    return num_pruned, num_nan


def positions_of(part: Candidates, span: range, key: int, scratch: Scratch) -> Tensor:
    keys = part.keys.load(span.start, span.stop, scratch).values.numpy()
    equal = np.equal(keys, keys.dtype.type(key), out=scratch.array("keep", keys.size, bool))
    if part.live is not None:
        equal &= _live(part.live[span.start : span.stop], scratch)
    return torch.from_numpy(np.flatnonzero(equal)) + span.start


def count_key(
    part: Candidates, span: range, key: int, cuts: Sequence[int], scratch: Scratch
) -> list[Count]:
    loaded = part.keys.load(span.start, span.stop, scratch)
    keys = loaded.values.numpy()
    equal = np.equal(keys, keys.dtype.type(key), out=scratch.array("keep", keys.size, bool))
    if part.live is not None:
        equal &= _live(part.live[span.start : span.stop], scratch)
    return [int(np.count_nonzero(equal[a:b])) for a, b in itertools.pairwise(cuts)]


def gather(part: Candidates, runs: Runs, dead: int) -> Tensor:
    keys = part.keys.gather(runs)
    if part.live is not None:
        live = runs.of(part.live) == 1
        keys.numpy()[~live.numpy()] = dead
    return keys


def _live(live: Tensor, scratch: Scratch) -> Array:
    """bool [m]: where a chunk of a mask is exactly 1."""
    return is_one(live, out=scratch.array("live", live.numel(), bool))


def _lower(keys: Array, live: Array, key: int, scratch: Scratch) -> None:
    """Set the keys of what does not compete, by integer operations: a masked copy takes longer."""
    integer = keys.dtype.type
    dead = scratch.array("dead", keys.size, keys.dtype)
    np.subtract(live, integer(1), out=dead)  # all bits are 1 where an element does not compete
    keys |= dead
    if key != -1:
        dead &= integer(~key)
        keys ^= dead


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
