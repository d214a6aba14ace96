"""What is done to one chunk of one parameter: by numpy on a CPU, by torch operations elsewhere.

The only code that touches every element. Both forms do the same steps with the same result;
the second is the reference of the first. numpy compares straight into bytes and holds no lock
meanwhile, so that chunks can go to threads; torch's own threads meet at a barrier after each of
these short operations. On other devices nothing here waits for the device: counts come to the
host together, when a pass is over (see memory.on_host).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from distprune._common import memory
from distprune._common.memory import INTEGERS, SERIAL, Array, Count, Places, Scratch
from distprune.selection.keys import Keys
from distprune.shards.geometry import IndexMap

# Closed interval of keys.
Interval = tuple[int, int]


class KeySource(Protocol):
    """Where the keys of one local shard come from; see keys.py."""

    is_thread_safe: bool
    dtype: torch.dtype

    def load(self, start: int, stop: int, scratch: Scratch | None = None) -> Keys: ...

    def gather(self, places: Places) -> Tensor: ...


@dataclass(frozen=True)
class Candidates:
    """One rank's part of one parameter, as selection sees it.

    Attributes:
        keys: of the flat local elements.
        live: flat mask in force; 1 = competes. None: all do.
        index: from flat positions to global indices.
        counted: the flat positions that this rank counts (replicas share).
        num_local: elements of this part ...
        numel: ... and of the whole parameter.
        device: of the keys.
    """

    keys: KeySource
    live: Tensor | None
    index: IndexMap
    counted: range
    num_local: int
    numel: int
    device: torch.device


@dataclass(frozen=True)
class Cut:
    """Where the total order is cut: what lies before it is pruned.

    Attributes:
        threshold: elements with a smaller key go, with a larger one stay.
        parameter: among equal keys, parameters before this one (in the caller's list) go ...
        index: ... and of this one, the elements with a smaller global index.
    """

    threshold: int
    parameter: int
    index: int


@dataclass(frozen=True)
class Found:
    """The live elements of one chunk whose keys lie in an interval.

    Attributes:
        span: flat positions of the chunk.
        positions: integers [m] from where the chunk begins.
        keys: [m].
        is_counted: whether this rank counts them.
        number: how many there are. A device may have had room for fewer, or more than enough
            (then the rest of ``positions`` and ``keys`` means nothing).
    """

    span: range
    positions: Tensor
    keys: Tensor
    is_counted: bool
    number: Count

    def first(self, number: int) -> Found:
        """The same with what means something, once it is known how much does."""
        return replace(
            self, positions=self.positions[:number], keys=self.keys[:number], number=number
        )


@dataclass(frozen=True)
class ChunkRead:
    """What one look at a chunk tells.

    Attributes:
        counts: live keys <= each pivot.
        num_below: live keys below the interval; 0 without one.
        found: what lies in the interval; None without one.
    """

    counts: list[Count]
    num_below: Count
    found: Found | None


def count_live(live: Tensor, scratch: Scratch) -> Count:
    """Elements of a chunk of a mask that are exactly 1."""
    if memory.takes_numpy(live.device):
        return int(np.count_nonzero(_live_on_cpu(live, scratch)))
    return torch.count_nonzero(live == 1)


def read(
    part: Candidates,
    span: range,
    pivots: Sequence[int],
    interval: Interval | None,
    out: Tensor | None,
    scratch: Scratch,
    room: int | None = None,
) -> ChunkRead:
    """Count the keys around pivots, and collect those in an interval.

    Args:
        part: where the chunk belongs.
        span: its flat positions, all of which this rank counts or none.
        pivots, interval: keys.
        out: flat mask of the whole part, uninitialised: the span of it becomes the mask in force
            with everything below the interval pruned. Needs an interval.
        room: how many elements a device may collect without waiting for their number; None: it
            waits, and has room for all.
    """
    if memory.takes_numpy(part.device):
        return _read_on_cpu(part, span, pivots, interval, out, scratch)
    return _read_anywhere(part, span, pivots, interval, out, room)


def write(
    part: Candidates,
    span: range,
    position: int,
    cut: Cut,
    out: Tensor,
    previous: Tensor | None,
    scratch: Scratch,
) -> Count:
    """Write the mask of a chunk: what lies before the cut is pruned.

    Args:
        part, span: as for :func:`read`.
        position: of the parameter in the list that was cut.
        out: flat mask of the whole part.
        previous: survivors keep its values; None: they become 1. It may be ``out``.

    Returns:
        How many live elements were pruned.
    """
    if memory.takes_numpy(part.device):
        return _write_on_cpu(part, span, position, cut, out, previous, scratch)
    return _write_anywhere(part, span, position, cut, out, previous)


def positions_of(part: Candidates, span: range, key: int, scratch: Scratch) -> Tensor:
    """Flat positions, int64 [m], of the live elements of a chunk that have a key."""
    keys = part.keys.load(span.start, span.stop, scratch).values
    if memory.takes_numpy(part.device):
        raw = keys.numpy()
        equal = np.equal(raw, raw.dtype.type(key), out=scratch.array("keep", raw.size, bool))
        if part.live is not None:
            equal &= _live_on_cpu(part.live[span.start : span.stop], scratch)
        positions = torch.from_numpy(np.flatnonzero(equal))
    else:
        flags = keys == key
        if part.live is not None:
            flags &= part.live[span.start : span.stop] == 1
        positions = flags.nonzero().squeeze(1)
    return positions + span.start


def gather(part: Candidates, places: Places, dead: int) -> Tensor:
    """Keys at some places, 1-d; ``dead`` where an element does not compete."""
    keys = part.keys.gather(places)
    if part.live is None:
        return keys
    live = places.of(part.live) == 1
    if memory.takes_numpy(part.device):
        keys.numpy()[~live.numpy()] = dead
        return keys
    return torch.where(live, keys, dead)


def copy(keys: Tensor, out: Tensor) -> None:
    """``out.copy_(keys)``, which torch would spread over threads."""
    if memory.takes_numpy(keys.device) and memory.takes_numpy(out.device):
        np.copyto(out.numpy(), keys.numpy())
    else:
        out.copy_(keys)


def prune_found(part: Candidates, position: int, cut: Cut, found: Found, out: Tensor) -> Count:
    """Prune, in a mask where they are 1, those of the found elements that come before the cut.

    Args:
        part, position, cut, out: as for :func:`write`.

    Returns:
        How many.
    """
    if memory.takes_numpy(part.device):
        return _prune_found_on_cpu(part, position, cut, found, out)
    before = found.keys <= cut.threshold if position < cut.parameter else found.keys < cut.threshold
    if position == cut.parameter and cut.index > 0:
        ties = (found.keys == cut.threshold).nonzero().squeeze(1)
        before[ties] = part.index(found.positions[ties].long() + found.span.start) < cut.index
    out[found.positions.long() + found.span.start] = (~before).to(out.dtype)
    return torch.count_nonzero(before)


def _read_on_cpu(
    part: Candidates,
    span: range,
    pivots: Sequence[int],
    interval: Interval | None,
    out: Tensor | None,
    scratch: Scratch,
) -> ChunkRead:
    loaded = part.keys.load(span.start, span.stop, scratch)
    keys = loaded.values.numpy()
    size, integer = keys.size, keys.dtype.type
    live, num_live = None, size
    if part.live is not None:
        live = _live_on_cpu(part.live[span.start : span.stop], scratch)
        num_live = int(np.count_nonzero(live))
    counts: dict[int, int] = {}
    num_below, found = 0, None
    if interval is not None:
        low, high = interval
        target = None if out is None else out[span.start : span.stop]
        previous = None if part.live is None else part.live[span.start : span.stop]
        # A bool mask is what is compared into.
        in_place = target is not None and _are_bool(target, previous)
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
            _store_on_cpu(target, previous, stay)
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
    return ChunkRead([counts[pivot] for pivot in pivots], num_below, found)


def _write_on_cpu(
    part: Candidates,
    span: range,
    position: int,
    cut: Cut,
    out: Tensor,
    previous: Tensor | None,
    scratch: Scratch,
) -> int:
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
        live = _live_on_cpu(part.live[span.start : span.stop], scratch)
        np.greater_equal(stay, live, out=stay)
    _store_on_cpu(target, before, stay)
    return keys.size - int(np.count_nonzero(stay))


def _prune_found_on_cpu(
    part: Candidates, position: int, cut: Cut, found: Found, out: Tensor
) -> int:
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


def _live_on_cpu(live: Tensor, scratch: Scratch) -> Array:
    """bool [m]: where a chunk of a mask is exactly 1."""
    if live.dtype is torch.bool:
        # In a mask that was read from a file any byte but 0 may be true.
        flags = scratch.array("live", live.numel(), bool)
        return np.not_equal(live.view(torch.uint8).numpy(), 0, out=flags)
    if live.itemsize not in INTEGERS:
        return (live == 1).numpy()
    bits = live.view(INTEGERS[live.itemsize]).numpy()
    return np.equal(bits, _bits_of_one(live.dtype), out=scratch.array("live", bits.size, bool))


def _store_on_cpu(out: Tensor, previous: Tensor | None, stay: Array) -> None:
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
            np.multiply(stay, _bits_of_one(out.dtype), out=bits)
        else:
            np.multiply(previous.view(INTEGERS[out.itemsize]).numpy(), stay, out=bits)


def _bits_of_one(dtype: torch.dtype) -> np.integer:
    """The bits of 1 in a dtype, as an integer of its size."""
    return torch.ones((), dtype=dtype).view(INTEGERS[dtype.itemsize]).numpy()[()]


def _are_bool(out: Tensor, previous: Tensor | None) -> bool:
    return out.dtype is torch.bool and (previous is None or previous.dtype is torch.bool)


def _read_anywhere(
    part: Candidates,
    span: range,
    pivots: Sequence[int],
    interval: Interval | None,
    out: Tensor | None,
    room: int | None,
) -> ChunkRead:
    keys = part.keys.load(span.start, span.stop).values
    previous = None if part.live is None else part.live[span.start : span.stop]
    live = None if previous is None else previous == 1
    num_live = keys.numel() if live is None else torch.count_nonzero(live)
    counts: dict[int, Count] = {}
    num_below: Count = 0
    found = None
    if interval is not None:
        low, high = interval
        target = None if out is None else out[span.start : span.stop]
        in_place = target is not None and _are_bool(target, previous)
        keep = torch.ge(keys, low, out=target) if in_place else keys >= low
        if live is not None:
            keep &= live
        inside = (keys <= high).logical_and_(keep)
        number = torch.count_nonzero(inside)
        num_below = num_live - torch.count_nonzero(keep)
        counts = {low - 1: num_below, high: num_below + number}
        if room is None:
            positions = inside.nonzero().squeeze(1)
        else:
            positions = torch.nonzero_static(inside, size=room, fill_value=0).squeeze(1)
        is_counted = span.start in part.counted
        found = Found(span, positions.int(), keys[positions], is_counted, number)
        if target is not None and not in_place:
            _store_anywhere(target, previous, keep if live is None else keep == live)
    for pivot in pivots:
        if pivot not in counts:
            upto = keys <= pivot
            counts[pivot] = torch.count_nonzero(upto if live is None else upto.logical_and_(live))
    return ChunkRead([counts[pivot] for pivot in pivots], num_below, found)


def _write_anywhere(
    part: Candidates, span: range, position: int, cut: Cut, out: Tensor, previous: Tensor | None
) -> Tensor:
    keys = part.keys.load(span.start, span.stop).values
    pruned = keys <= cut.threshold if position < cut.parameter else keys < cut.threshold
    if position == cut.parameter and cut.index > 0:
        ties = (keys == cut.threshold).nonzero().squeeze(1)
        pruned[ties] = part.index(ties + span.start) < cut.index
    if part.live is not None:
        pruned &= part.live[span.start : span.stop] == 1
    num_pruned = torch.count_nonzero(pruned)
    before = None if previous is None else previous[span.start : span.stop]
    _store_anywhere(out[span.start : span.stop], before, pruned.logical_not_())
    return num_pruned


def _store_anywhere(out: Tensor, previous: Tensor | None, stay: Tensor) -> None:
    if previous is None:
        out.copy_(stay)
    elif previous is out or previous.dtype == out.dtype:
        torch.mul(previous, stay, out=out)
    else:
        out.copy_(previous).mul_(stay)
