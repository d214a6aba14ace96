"""``kernels.Kernels`` on any device, by torch operations.

Nothing here waits for the device, unless a scan without a capacity or the count of a key does:
counts are copied to the host together, at the end of a pass (see memory.on_host).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distprune.base.blocks import Blocks
from distprune.base.memory import Count, Runs, Scratch, count_segments
from distprune.selection.candidates import Candidates, ChunkScan, Collected, Cut, Interval, are_bool
from distprune.selection.keys import KeyRange

# Few launches, and less than a gigabyte of scratch memory.
CHUNK_BYTES = 1 << 26
USES_THREADS = False


def count_live(live: Tensor, scratch: Scratch) -> Count:
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
    keys = part.keys.load(span.start, span.stop).values
    previous = None if part.live is None else part.live[span.start : span.stop]
    live = None if previous is None else previous == 1
    num_live = keys.numel() if live is None else torch.count_nonzero(live)
    counts: dict[int, Count] = {}
    num_below: Count = 0
    collected = None
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
        collected = Collected(span, positions.int(), keys[positions], is_counted, number)
        if target is not None and not in_place:
            _store(target, previous, keep if live is None else keep == live)
    for pivot in pivots:
        if pivot not in counts:
            upto = keys <= pivot
            counts[pivot] = torch.count_nonzero(upto if live is None else upto.logical_and_(live))
    return ChunkScan([counts[pivot] for pivot in pivots], num_below, collected)


def write(
    part: Candidates,
    span: range,
    position: int,
    cut: Cut,
    out: Tensor,
    previous: Tensor | None,
    scratch: Scratch,
) -> Count:
    keys = part.keys.load(span.start, span.stop).values
    pruned = keys <= cut.threshold if position < cut.parameter else keys < cut.threshold
    if position == cut.parameter and cut.index > 0:
        if part.index.is_ascending:
            end = min(max(part.index.position_of(cut.index) - span.start, 0), len(span))
            torch.le(keys[:end], cut.threshold, out=pruned[:end])
        else:
            ties = (keys == cut.threshold).nonzero().squeeze(1)
            pruned[ties] = part.index(ties + span.start) < cut.index
    if part.live is not None:
        pruned &= part.live[span.start : span.stop] == 1
    num_pruned = torch.count_nonzero(pruned)
    earlier = None if previous is None else previous[span.start : span.stop]
    _store(out[span.start : span.stop], earlier, pruned.logical_not_())
    return num_pruned


def prune_collected(
    part: Candidates, position: int, cut: Cut, collected: Collected, out: Tensor
) -> Count:
    keys, positions = collected.keys, collected.positions.long() + collected.span.start
    is_before = keys <= cut.threshold if position < cut.parameter else keys < cut.threshold
    if position == cut.parameter and cut.index > 0:
        ties = (keys == cut.threshold).nonzero().squeeze(1)
        is_before[ties] = part.index(positions[ties]) < cut.index
    out[positions] = (~is_before).to(out.dtype)
    return torch.count_nonzero(is_before)


def write_lowest(
    part: Candidates,
    span: range,
    blocks: Blocks,
    keys: KeyRange,
    out: Tensor,
    scratch: Scratch,
) -> tuple[Count, Count]:
    numbers = part.keys.load(span.start, span.stop).values
    live, previous = None, None
    if part.live is not None:
        previous = part.live[span.start : span.stop]
        live = previous == 1
        numbers = torch.where(live, numbers, keys.low - 1)
    counted = part.counted_in(span)
    num_nan: Count = 0
    if keys.is_float:
        num_nan = torch.count_nonzero(numbers[counted] > keys.largest_number)
    # One row for each block.
    shape = (-1, blocks.length, blocks.columns, blocks.kernel)
    turned = numbers.view(shape).transpose(1, 2)
    rows = turned.reshape(-1, blocks.size)
    first = rows.sort(dim=1, stable=True).indices[:, : blocks.num_pruned]
    chosen = torch.zeros(rows.shape, dtype=torch.bool, device=rows.device).scatter_(1, first, True)
    lowest = chosen.view(turned.shape).transpose(1, 2).reshape(-1)
    if live is not None:
        lowest &= live
    num_pruned = torch.count_nonzero(lowest[counted])
    _store(out[span.start : span.stop], previous, lowest.logical_not_())
    return num_pruned, num_nan


def positions_of(part: Candidates, span: range, key: int, scratch: Scratch) -> Tensor:
    flags = part.keys.load(span.start, span.stop, scratch).values == key
    if part.live is not None:
        flags &= part.live[span.start : span.stop] == 1
    return flags.nonzero().squeeze(1) + span.start


def count_key(
    part: Candidates, span: range, key: int, cuts: Sequence[int], scratch: Scratch
) -> list[int]:
    equal = part.keys.load(span.start, span.stop, scratch).values == key
    if part.live is not None:
        equal &= part.live[span.start : span.stop] == 1
    return count_segments(equal, cuts)


def histogram(keys: Tensor, low: int, high: int, shift: int) -> Tensor:
    first = low >> shift
    bins = (keys[(keys >= low) & (keys <= high)] >> shift).long() - first
    return torch.bincount(bins, minlength=(high >> shift) - first + 1)


def gather(part: Candidates, runs: Runs, dead: int) -> Tensor:
    keys = part.keys.gather(runs)
    return keys if part.live is None else torch.where(runs.of(part.live) == 1, keys, dead)


def _store(out: Tensor, previous: Tensor | None, stay: Tensor) -> None:
    if previous is None:
        out.copy_(stay)
    elif previous is out or previous.dtype == out.dtype:
        torch.mul(previous, stay, out=out)
    else:
        out.copy_(previous).mul_(stay)
