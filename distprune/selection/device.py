"""What is done to one chunk of one parameter on any device, by torch operations.

The same functions as in cpu.py, with the same results. Nothing here waits for the device: counts
come to the host together, when a pass is over (see memory.on_host).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distprune._common.memory import Count, Places, Scratch
from distprune.selection.candidates import Candidates, ChunkScan, Cut, Found, Interval, are_bool


def count_live(live: Tensor, scratch: Scratch) -> Count:
    """Elements of a chunk of a mask that are exactly 1."""
    return torch.count_nonzero(live == 1)


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
        in_place = target is not None and are_bool(target, previous)
        keep = torch.ge(keys, low, out=target) if in_place else keys >= low
        if live is not None:
            keep &= live
        inside = (keys <= high).logical_and_(keep)
        number = torch.count_nonzero(inside)
        num_below = num_live - torch.count_nonzero(keep)
        counts = {low - 1: num_below, high: num_below + number}
        if capacity is None:
            positions = inside.nonzero().squeeze(1)
        else:
            positions = torch.nonzero_static(inside, size=capacity, fill_value=0).squeeze(1)
        is_counted = span.start in part.counted
        found = Found(span, positions.int(), keys[positions], is_counted, number)
        if target is not None and not in_place:
            _store(target, previous, keep if live is None else keep == live)
    for pivot in pivots:
        if pivot not in counts:
            upto = keys <= pivot
            counts[pivot] = torch.count_nonzero(upto if live is None else upto.logical_and_(live))
    return ChunkScan([counts[pivot] for pivot in pivots], num_below, found)


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
        part, span, scratch: as for :func:`scan`.
        position: of the parameter in the list that was cut.
        out: flat mask of the whole part.
        previous: survivors keep its values; None: they become 1. It may be ``out``.

    Returns:
        How many live elements were pruned.
    """
    keys = part.keys.load(span.start, span.stop).values
    pruned = keys <= cut.threshold if position < cut.parameter else keys < cut.threshold
    if position == cut.parameter and cut.index > 0:
        ties = (keys == cut.threshold).nonzero().squeeze(1)
        pruned[ties] = part.index(ties + span.start) < cut.index
    if part.live is not None:
        pruned &= part.live[span.start : span.stop] == 1
    num_pruned = torch.count_nonzero(pruned)
    before = None if previous is None else previous[span.start : span.stop]
    _store(out[span.start : span.stop], before, pruned.logical_not_())
    return num_pruned


def prune_found(part: Candidates, position: int, cut: Cut, found: Found, out: Tensor) -> Count:
    """Prune, in a mask where they are 1, those of the found elements that come before the cut.

    Args:
        part, position, cut, out: as for :func:`write`.

    Returns:
        How many.
    """
    before = found.keys <= cut.threshold if position < cut.parameter else found.keys < cut.threshold
    if position == cut.parameter and cut.index > 0:
        ties = (found.keys == cut.threshold).nonzero().squeeze(1)
        before[ties] = part.index(found.positions[ties].long() + found.span.start) < cut.index
    out[found.positions.long() + found.span.start] = (~before).to(out.dtype)
    return torch.count_nonzero(before)


def positions_of(part: Candidates, span: range, key: int, scratch: Scratch) -> Tensor:
    """Flat positions, int64 [m], of the live elements of a chunk that have a key."""
    flags = part.keys.load(span.start, span.stop, scratch).values == key
    if part.live is not None:
        flags &= part.live[span.start : span.stop] == 1
    return flags.nonzero().squeeze(1) + span.start


def gather(part: Candidates, places: Places, dead: int) -> Tensor:
    """Keys at some places, 1-d; ``dead`` where an element does not compete."""
    keys = part.keys.gather(places)
    return keys if part.live is None else torch.where(places.of(part.live) == 1, keys, dead)


def _store(out: Tensor, previous: Tensor | None, stay: Tensor) -> None:
    if previous is None:
        out.copy_(stay)
    elif previous is out or previous.dtype == out.dtype:
        torch.mul(previous, stay, out=out)
    else:
        out.copy_(previous).mul_(stay)
