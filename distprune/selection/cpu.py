"""``kernels.Kernels`` on a CPU, by numpy; device.py is the reference of this module.

numpy compares into bytes without a copy and without the interpreter's lock, so several threads can
visit chunks. torch's own threads would meet at a barrier after each of these short operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from distprune.base.blocks import Blocks
from distprune.base.mask_values import bits_of_one, is_one
from distprune.base.memory import INTEGERS, SERIAL, Array, Count, Runs, Scratch, count_segments
from distprune.selection.candidates import Candidates, ChunkScan, Collected, Cut, Interval, are_bool
from distprune.selection.keys import KeyRange, replace_dead

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
    blocks: Blocks,
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
        replace_dead(numbers, live, keys.low - 1, scratch)
    counted = part.counted_in(span)
    num_nan = 0
    if keys.is_float and loaded.highest > keys.largest_number:
        num_nan = int(np.count_nonzero(numbers[counted] > keys.largest_number))
    lowest = lowest_of(blocks, numbers, scratch)
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
) -> list[int]:
    loaded = part.keys.load(span.start, span.stop, scratch)
    keys = loaded.values.numpy()
    equal = np.equal(keys, keys.dtype.type(key), out=scratch.array("keep", keys.size, bool))
    if part.live is not None:
        equal &= _live(part.live[span.start : span.stop], scratch)
    return count_segments(torch.from_numpy(equal), cuts)


def gather(part: Candidates, runs: Runs, dead: int) -> Tensor:
    keys = part.keys.gather(runs)
    if part.live is not None:
        live = runs.of(part.live) == 1
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


# Elements that are ranked at a time if rows are interleaved, because ranking copies them.
_STRIPE = 1 << 19
# Longer blocks are partitioned: comparing all pairs would take more time.
_FEW = 16
# Rows of at least so many elements are compared one by one.
_WIDE = 64
# About how many elements a pattern has.
_PATTERN = 1 << 14


def lowest_of(blocks: Blocks, keys: Array, scratch: Scratch | None = None) -> Array:
    """Which elements of blocks are pruned.

    Args:
        blocks: of one tensor.
        keys: 1-d, of whole bands.
        scratch: memory to use again; the result lies in it, until the next call.

    Returns:
        bool, like keys.

    Cost: scratch memory of about 10 bytes per element; 2 bytes for blocks of few elements.
    """
    scratch = scratch or Scratch()
    lowest = scratch.array("lowest", keys.size, bool)
    if blocks.num_pruned in (0, blocks.size):
        lowest.fill(blocks.num_pruned > 0)
    elif blocks.kernel == 1 and blocks.size <= _FEW:
        _lowest_of_few(keys, blocks, lowest, scratch)
    elif blocks.columns == 1:
        rows = (-1, blocks.size)
        _lowest_in_rows(keys.reshape(rows), blocks.num_pruned, lowest.reshape(rows), scratch)
    else:
        _lowest_in_columns(keys, blocks, lowest, scratch)
    return lowest


def _lowest_in_columns(keys: Array, blocks: Blocks, lowest: Array, scratch: Scratch) -> None:
    """:func:`_lowest_in_rows` of rows that are interleaved: they are copied apart, and back."""
    shape = (-1, blocks.length, blocks.columns, blocks.kernel)
    bands, lowest = keys.reshape(shape), lowest.reshape(shape)
    num_bands = max(_STRIPE // blocks.band, 1)
    num_columns = max(_STRIPE // blocks.size, 1)
    for first in range(0, len(bands), num_bands):
        for column in range(0, blocks.columns, num_columns):
            part = np.s_[first : first + num_bands, :, column : column + num_columns]
            turned = bands[part].swapaxes(1, 2)
            apart = scratch.array("apart", turned.size, keys.dtype)
            np.copyto(apart.reshape(turned.shape), turned)
            of_part = scratch.array("lowest apart", turned.size, bool)
            rows = (-1, blocks.size)
            _lowest_in_rows(apart.reshape(rows), blocks.num_pruned, of_part.reshape(rows), scratch)
            lowest[part] = of_part.reshape(turned.shape).swapaxes(1, 2)


def _lowest_in_rows(keys: Array, k: int, lowest: Array, scratch: Scratch) -> None:
    """The k lowest keys of every row; among equal ones those further left.

    Args:
        keys: [rows, n].
        k: 0 < k < n.
        lowest: bool [rows, n]; k of them become True in each row.
    """
    ordered = scratch.array("ordered", keys.size, keys.dtype).reshape(keys.shape)
    np.copyto(ordered, keys)
    ordered.partition(k - 1, axis=1)
    threshold = ordered[:, k - 1 : k].copy()
    np.less_equal(keys, threshold, out=lowest)
    if np.count_nonzero(lowest) == len(keys) * k:
        return
    # The last ties of a row stay, as many as are too many.
    num_extra = lowest.view(np.uint8).sum(axis=1, dtype=np.int32, keepdims=True) - k
    ties = np.equal(keys, threshold, out=scratch.array("ties", keys.size, bool).reshape(keys.shape))
    ordinals = scratch.array("ordinals", keys.size, np.int32).reshape(keys.shape)
    np.cumsum(ties, axis=1, dtype=np.int32, out=ordinals)
    ties &= ordinals > ordinals[:, -1:] - num_extra
    lowest ^= ties


def _lowest_of_few(keys: Array, blocks: Blocks, lowest: Array, scratch: Scratch) -> None:
    """The lowest of short blocks, by comparing all pairs of a block.

    The place of an element in its block is how many others come before it: as many as stand before
    it, and those after it that are lower, less those before it that are larger. Elements at a
    distance d are compared in all blocks at once, as ``keys[d:] < keys[:-d]``, and a pattern drops
    the pairs that are not of one block. Of blocks of four::

        distance 1     0-1 1-2 2-3  .  0-1 1-2 2-3  .
        distance 2     0-2 1-3  .   .  0-2 1-3  .   .
        distance 3     0-3  .   .   .  0-3  .   .   .
    """
    # Along the second dimension, neighbours are of one block; where its steps are short, bands
    # are joined to long ones.
    pattern = None if blocks.columns >= _WIDE else _indices(blocks.length, blocks.columns)
    shape = (-1, blocks.length, blocks.columns) if pattern is None else (1, -1, blocks.columns)
    places = scratch.array("places", keys.size, np.uint8)
    if pattern is None:
        np.copyto(places.reshape(shape), np.arange(blocks.length, dtype=np.uint8)[:, None])
    else:
        _repeat(np.copyto, places, pattern)
    keys, lowest, places = keys.reshape(shape), lowest.reshape(shape), places.reshape(shape)
    for distance in range(1, blocks.length):
        left, right = np.s_[:, :-distance], np.s_[:, distance:]
        np.less(keys[right], keys[left], out=lowest[left])
        if pattern is not None:
            _repeat(_and, lowest.reshape(-1), pattern < blocks.length - distance)
        is_lower = lowest[left].view(np.uint8)
        places[left] += is_lower
        places[right] -= is_lower
    np.less(places, blocks.num_pruned, out=lowest)


def _repeat(operation: Callable[[Array, Array], object], flat: Array, pattern: Array) -> None:
    """Call an operation for an array, and for a pattern over and over."""
    end = flat.size // pattern.size * pattern.size
    operation(flat[:end].reshape(-1, pattern.size), pattern)
    operation(flat[end:], pattern[: flat.size - end])


def _and(flags: Array, pattern: Array) -> None:
    np.logical_and(flags, pattern, out=flags)


@lru_cache(maxsize=16)
def _indices(length: int, columns: int) -> Array:
    """uint8, 1-d: the index in its block of each element of some bands [length, columns]."""
    band = np.repeat(np.arange(length, dtype=np.uint8), columns)
    return np.tile(band, max(_PATTERN // band.size, 1))
