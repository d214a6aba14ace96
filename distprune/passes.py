"""The passes over the scores: chunk by chunk, so that scratch memory does not grow.

The only code that touches every element. Selection decides what to count and
what to write; a pass does it for this rank's part. Chunks of CPU tensors are
compared by numpy, which is vectorised and takes threads without barriers; every
other device runs the same steps as torch operations.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from distprune.geometry import IndexMap

T = TypeVar("T")

# Elements per chunk: on a CPU keys and flags stay in the second-level cache; on
# an accelerator launches are few and scratch stays under a gigabyte.
_CPU_CHUNK = 1 << 17
_DEVICE_CHUNK = 1 << 24


class KeySource(Protocol):
    """Where the keys of one local shard come from; see keys.py."""

    is_thread_safe: bool

    def load(self, start: int, stop: int) -> Tensor: ...

    def gather(self, positions: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Candidates:
    """One rank's part of one parameter, as selection sees it.

    Attributes:
        keys: of the flat local elements.
        live: flat mask in force; 1 = competes. None: all do.
        index: from flat positions to global indices.
        counted: the flat positions that this rank counts (replicas share).
        numel: elements of the whole parameter.
        device: of the keys.
    """

    keys: KeySource
    live: Tensor | None
    index: IndexMap
    counted: range
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


def count_live(live: Tensor | None, counted: range) -> int:
    """Elements of a flat mask, among the counted ones, that compete."""
    if live is None:
        return len(counted)
    return sum(
        _count_true(live[span.start : span.stop] == 1) for span in _chunks(counted, live.device)
    )


def count_and_collect(
    parts: Sequence[Candidates],
    pivots: Sequence[int],
    interval: tuple[int, int] | None,
    dead: int,
) -> tuple[list[list[int]], list[Tensor]]:
    """One read of the counted elements.

    Args:
        parts: this rank's parameters.
        pivots: keys.
        interval: closed interval of keys to collect, or None.
        dead: a key above all these, that stands for what does not compete.

    Returns:
        Per parameter: how many live keys are <= each pivot; and the live keys in
        the interval, 1-d.
    """
    counts = [[0] * len(pivots) for _ in parts]
    collected: list[list[Tensor]] = [[] for _ in parts]

    def visit(which: int, span: range) -> tuple[int, list[int], Tensor | None]:
        keys = _live_keys(parts[which], span, dead)
        if keys.device.type == "cpu":
            raw = keys.numpy()
            below = [int(np.count_nonzero(raw <= raw.dtype.type(pivot))) for pivot in pivots]
            if interval is None:
                return which, below, None
            low, high = (raw.dtype.type(bound) for bound in interval)
            found = torch.from_numpy(raw[np.flatnonzero((raw >= low) & (raw <= high))])
        else:
            below = [torch.count_nonzero(keys <= pivot) for pivot in pivots]
            if interval is None:
                return which, below, None
            found = keys[(keys >= interval[0]) & (keys <= interval[1])]
        return which, below, found

    for which, below, found in _for_each_chunk(visit, parts):
        for j, count in enumerate(below):
            counts[which][j] += count
        if found is not None and found.numel():
            collected[which].append(found)
    empty = torch.empty(0, dtype=torch.int64)
    return (
        [[int(count) for count in row] for row in counts],
        [torch.cat(found).cpu() if found else empty for found in collected],
    )


def count_before(parts: Sequence[Candidates], cut: Cut) -> list[int]:
    """How many counted live elements of each part lie before a cut; parts are in its order."""
    counts = [0] * len(parts)

    def visit(which: int, span: range) -> tuple[int, int]:
        part = parts[which]
        keys = part.keys.load(span.start, span.stop)
        before = _before_cut(part, which, cut, keys, span)
        if part.live is not None:
            before &= _is_live(part, span)
        return which, _count_true(before)

    for which, count in _for_each_chunk(visit, parts):
        counts[which] += count
    return counts


def indices_at(part: Candidates, key: int, low: int, high: int) -> Iterator[Tensor]:
    """Global indices in [low, high) of the counted live elements with a key, chunk by chunk."""
    for span in _chunks(part.counted, part.device):
        equal = part.keys.load(span.start, span.stop) == key
        if part.live is not None:
            equal &= _is_live(part, span)
        positions = equal.nonzero().squeeze(1)
        if positions.numel():
            indices = part.index(positions + span.start)
            yield indices[(indices >= low) & (indices < high)].cpu()


def sample(part: Candidates, size: int, generator: torch.Generator) -> Tensor:
    """About ``size`` live keys from all over the counted elements, 1-d.

    Sixteen neighbours are read per place, as a cache line brings them anyway.
    """
    num_counted = len(part.counted)
    burst = 16 if num_counted >= 4096 else 1
    num_rows = num_counted // burst
    wanted = size / burst
    num_drawn = int(wanted) + int(torch.rand((), generator=generator).item() < wanted % 1)
    num_drawn = min(num_rows, num_drawn)
    if num_drawn == 0:
        return torch.empty(0, dtype=torch.int64)
    # One place per stratum, jittered: regular data cannot hide between the places.
    jitter = torch.rand(num_drawn, dtype=torch.float64, generator=generator)
    rows = ((torch.arange(num_drawn, dtype=torch.float64) + jitter) * (num_rows / num_drawn)).long()
    rows.clamp_(max=num_rows - 1)
    positions = (rows.unsqueeze(1) * burst + torch.arange(burst)).view(-1) + part.counted.start
    positions = positions.to(part.device)
    keys = part.keys.gather(positions)
    if part.live is not None:
        keys = keys[part.live[positions] == 1]
    return keys.cpu()


def write_keep(part: Candidates, position: int, cut: Cut, out: Tensor, *, fresh: bool) -> int:
    """Write the mask of a parameter: zero what lies before the cut, leave the rest.

    Args:
        part: the local part; all of it is written, not only what is counted.
        position: of the parameter in the caller's list.
        cut: where the order is cut.
        out: flat mask, any dtype; contiguous.
        fresh: ``out`` is uninitialised: survivors become 1. Otherwise they keep
            the value that they have.

    Returns:
        How many counted live elements were pruned.
    """

    def visit(_: int, span: range) -> int:
        keys = part.keys.load(span.start, span.stop)
        pruned = _before_cut(part, position, cut, keys, span)
        if part.live is not None:
            pruned &= _is_live(part, span)
        target = out[span.start : span.stop]
        if fresh:
            torch.logical_not(pruned, out=target)
        else:
            target.mul_(torch.logical_not(pruned))
        first = max(span.start, part.counted.start) - span.start
        last = min(span.stop, part.counted.stop) - span.start
        return _count_true(pruned[first:last]) if last > first else 0

    return sum(_for_each_chunk(visit, [part], whole=out.numel()))


def _before_cut(part: Candidates, position: int, cut: Cut, keys: Tensor, span: range) -> Tensor:
    """bool [len(span)]: which elements come before the cut."""
    if position < cut.parameter:
        return _compare(keys, "<=", cut.threshold)
    pruned = _compare(keys, "<", cut.threshold)
    if position == cut.parameter and cut.index > 0:
        ties = (keys == cut.threshold).nonzero().squeeze(1)
        if ties.numel():
            pruned[ties[part.index(ties + span.start) < cut.index]] = True
    return pruned


def _compare(keys: Tensor, relation: str, key: int) -> Tensor:
    if keys.device.type == "cpu":
        raw, bound = keys.numpy(), keys.numpy().dtype.type(key)
        return torch.from_numpy(raw <= bound if relation == "<=" else raw < bound)
    return keys <= key if relation == "<=" else keys < key


def _count_true(flags: Tensor) -> int:
    if flags.device.type == "cpu":
        return int(np.count_nonzero(flags.numpy()))
    return int(torch.count_nonzero(flags))


def _is_live(part: Candidates, span: range) -> Tensor:
    assert part.live is not None
    return part.live[span.start : span.stop] == 1


def _live_keys(part: Candidates, span: range, dead: int) -> Tensor:
    keys = part.keys.load(span.start, span.stop)
    if part.live is None:
        return keys
    return keys.masked_fill_(~_is_live(part, span), dead)


def _chunks(positions: range, device: torch.device) -> Iterator[range]:
    size = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    for start in range(positions.start, positions.stop, size):
        yield range(start, min(start + size, positions.stop))


def _for_each_chunk(
    visit: Callable[[int, range], T], parts: Sequence[Candidates], whole: int | None = None
) -> list[T]:
    """Visit every chunk of every part, on as many threads as torch would use."""
    work = [
        (which, span)
        for which, part in enumerate(parts)
        for span in _chunks(part.counted if whole is None else range(whole), part.device)
    ]
    num_threads = min(torch.get_num_threads(), len(work))
    threaded = all(part.keys.is_thread_safe and part.device.type == "cpu" for part in parts)
    if num_threads <= 1 or not threaded:
        return [visit(which, span) for which, span in work]
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(visit, *zip(*work, strict=True)))
