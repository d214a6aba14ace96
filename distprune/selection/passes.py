"""The passes over the scores: chunk by chunk, so that scratch memory does not grow.

Selection decides what to count and what to write; a pass does it for this rank's part,
cpu.py and device.py say what is done to a chunk.

[Note: draft] The scan that counts around the k-th key writes masks too, as if the cut were
where its interval begins: nearly all elements lie on one side of the interval, and are
never looked at again. Once the cut is known, only those that were found in the interval are
set right. Masks are new tensors until all ranks have theirs, so a draft can be thrown away.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from distprune._common.memory import Count, Places, Scratch, concatenate, copy, on_host
from distprune.selection.candidates import Candidates, Cut, Found, Interval, PartCut
from distprune.selection.kernels import kernels_on

R = TypeVar("R")

# Bytes of values per chunk: on a CPU keys and flags stay in the cache, and the interpreter's lock
# is not asked for too often; on an accelerator launches are few and scratch stays under a gigabyte.
_CPU_CHUNK = 3 << 19
_DEVICE_CHUNK = 1 << 26
# Of smaller pieces threads would wait for each other more than they work.
_THREADED_PIECE = 1 << 19
# More threads than this spend their time on waiting for the interpreter's lock.
_MAX_THREADS = 8


@dataclass(frozen=True)
class Scan:
    """What one pass over this rank's parameters counted and collected.

    Attributes:
        counts: per parameter, the counted live keys <= each pivot.
        num_below: per parameter, the counted live keys below the interval; 0 without one.
        interval: of keys.
        found: per parameter, what lies in the interval, chunk by chunk.
        keys: the counted keys in the interval, 1-d, on the CPU, parameter by parameter ...
        sizes: ... and how many of each.
    """

    counts: list[list[int]]
    num_below: list[int]
    interval: Interval | None
    found: list[list[Found]]
    keys: Tensor
    sizes: list[int]


def count_live(live: Tensor | None, counted: range) -> int:
    """Elements of a flat mask, among the counted ones, that compete."""
    return count_each_live([live], [counted])[0]


def count_each_live(live: Sequence[Tensor | None], counted: Sequence[range]) -> list[int]:
    """The same of several masks; they come over from a device together."""

    pieces = [
        (position, mask[span.start : span.stop])
        for position, (mask, positions) in enumerate(zip(live, counted, strict=True))
        if mask is not None
        for span in _chunks(positions, mask.device, mask.itemsize)
    ]
    calls = [partial(kernels_on(chunk.device).count_live, chunk) for _, chunk in pieces]
    on_cpu = all(mask is None or mask.device.type == "cpu" for mask in live)
    num_elements = sum(chunk.numel() for _, chunk in pieces)
    numbers = on_host(_for_each(calls, _num_threads(num_elements, len(calls)) if on_cpu else 1))
    totals = [
        len(positions) if mask is None else 0 for mask, positions in zip(live, counted, strict=True)
    ]
    for (position, _), number in zip(pieces, numbers, strict=True):
        totals[position] += number
    return totals


def scan(
    parts: Sequence[Candidates],
    pivots: Sequence[int],
    interval: Interval | None,
    drafts: Sequence[Tensor] | None = None,
    expected_share: float = 1.0,
) -> Scan:
    """One pass over the counted elements, or over all local ones if there are drafts to write.

    Args:
        parts: this rank's parameters.
        pivots: keys.
        interval: closed interval of keys to collect, or None.
        drafts: flat masks, uninitialised, one per part: see [Note: draft]. Written if there is
            an interval.
        expected_share: of all elements, that the interval is expected to hold. Where a device
            meets many more in a chunk, that chunk is scanned again.
    """
    outs = drafts if drafts is not None and interval is not None else None
    pieces, calls = [], []
    for position, span in _pieces(parts, only_counted=outs is None):
        part = parts[position]
        out = None if outs is None else outs[position]
        capacity = min(len(span), int(4 * expected_share * len(span)) + 1024)
        kernel = kernels_on(part.device).scan
        pieces.append((position, span))
        calls.append(partial(kernel, part, span, pivots, interval, out, capacity=capacity))
    chunks = _for_each(calls, _threads_for(parts, pieces))
    numbers = iter(
        on_host(
            [
                count
                for chunk in chunks
                for count in (
                    0 if chunk.found is None else chunk.found.number,
                    chunk.num_below,
                    *chunk.counts,
                )
            ]
        )
    )
    totals = [[0] * (1 + len(pivots)) for _ in parts]
    found: list[list[Found]] = [[] for _ in parts]
    for (position, _), call, chunk in zip(pieces, calls, chunks, strict=True):
        number = next(numbers)
        row = [next(numbers) for _ in range(1 + len(pivots))]
        if chunk.found is None or chunk.found.is_counted:
            totals[position] = [
                total + count for total, count in zip(totals[position], row, strict=True)
            ]
        if chunk.found is not None and number:
            collected = chunk.found
            if number > collected.positions.numel():
                collected = call(Scratch(), capacity=None).found
            found[position].append(collected.first(number))
    return Scan(
        [row[1:] for row in totals],
        [row[0] for row in totals],
        interval,
        found,
        _on_cpu([chunk.keys for of_part in found for chunk in of_part if chunk.is_counted]),
        [sum(chunk.keys.numel() for chunk in of_part if chunk.is_counted) for of_part in found],
    )


def write_masks(
    parts: Sequence[Candidates],
    cuts: Sequence[PartCut],
    outs: Sequence[Tensor],
    drafted: Scan | None = None,
) -> list[int]:
    """Write the masks of this rank: zero what lies before the cuts, and no other live element.

    The one place where masks become final. Drafted masks are corrected where they are wrong;
    others are written, chunk by chunk.

    Args:
        parts: this rank's parameters.
        cuts: of each part.
        outs: flat masks, one per part, contiguous.
        drafted: the scan that drafted ``outs``, of the same parts in the same order. All cuts are
            one then.

    Returns:
        Per parameter, how many counted live elements were pruned.

    Cost: one pass over the parts without a valid draft; with one, over the collected elements only.
    """
    counts: list[Count | None] = [None] * len(parts)
    if drafted is not None:
        counts = finish_drafts(drafted, parts, cuts[0].cut, outs)
    for position, (part, own) in enumerate(zip(parts, cuts, strict=True)):
        if counts[position] is None:
            counts[position] = write_keep(part, own.position, own.cut, outs[position], part.live)
    return on_host([count for count in counts if count is not None])


def finish_drafts(
    scanned: Scan, parts: Sequence[Candidates], cut: Cut, drafts: Sequence[Tensor]
) -> list[Count | None]:
    """Correct drafted masks without another pass; see [Note: draft].

    Args:
        scanned: the scan that drafted them.
        parts: the parameters that were scanned, and cut, in this order.
        cut: where the order is cut.
        drafts: flat masks of the parts, all of them.

    Returns:
        Per parameter, how many counted live elements were pruned; None if the cut lies elsewhere,
        and the mask has to be written anew.

    Cost: only the elements that were collected in the interval are visited.
    """
    assert scanned.interval is not None
    low, high = scanned.interval
    if not low <= cut.threshold <= high:
        return [
            scanned.num_below[position] if _is_exact(position, cut, low) else None
            for position in range(len(parts))
        ]

    counts: list[Count | None] = []
    for position, part in enumerate(parts):
        num_pruned: Count = scanned.num_below[position]
        for found in scanned.found[position]:
            number = kernels_on(part.device).prune_found(
                part, position, cut, found, drafts[position]
            )
            if found.is_counted:
                num_pruned = num_pruned + number
        counts.append(num_pruned)
    return counts


def _is_exact(position: int, cut: Cut, low: int) -> bool:
    """Whether a draft that keeps all keys from ``low`` on is what a cut elsewhere asks for."""
    kept_from = cut.threshold + 1 if position < cut.parameter else cut.threshold
    return kept_from == low and (position != cut.parameter or cut.index == 0)


def indices_at(part: Candidates, key: int, low: int, high: int) -> Iterator[Tensor]:
    """Global indices in [low, high) of the counted live elements with a key, chunk by chunk."""
    scratch = Scratch()
    for span in _chunks(part.counted, part.device, part.keys.dtype.itemsize):
        positions = kernels_on(part.device).positions_of(part, span, key, scratch)
        if positions.numel():
            indices = part.index(positions)
            yield indices[(indices >= low) & (indices < high)].cpu()


def sample(
    parts: Sequence[Candidates], rate: float, dead: int, generator: np.random.Generator
) -> Tensor:
    """Keys of about that share of the counted elements of all parameters, 1-d, on the CPU.

    ``dead`` stands for an element that does not compete.
    """
    places = [_places(part.counted, rate, generator) for part in parts]
    sizes = [each.runs.numel() * each.length for each in places]
    if not sum(sizes):
        return torch.empty(0, dtype=torch.int64)
    drawn = torch.empty(sum(sizes), dtype=parts[0].keys.dtype, device=parts[0].device)
    for part, where, out in zip(parts, places, drawn.split(sizes), strict=True):
        if out.numel():
            copy(kernels_on(part.device).gather(part, where, dead), out)
    return drawn.cpu()


def _places(counted: range, rate: float, generator: np.random.Generator) -> Places:
    """Where to sample: sixteen neighbours at a time, as a cache line brings them anyway."""
    length = 16 if len(counted) >= 4096 else 1
    num_runs = len(counted) // length
    wanted = math.ceil(len(counted) * rate) / length
    num_drawn = min(num_runs, int(wanted) + int(generator.random() < wanted % 1))
    # One run per stratum, jittered: regular data cannot hide between them.
    runs = (np.arange(num_drawn) + generator.random(num_drawn)) * (num_runs / max(1, num_drawn))
    runs = np.minimum(runs.astype(np.int64), num_runs - 1)
    return Places(counted.start, counted.stop, length, torch.from_numpy(runs))


def write_keep(
    part: Candidates, position: int, cut: Cut, out: Tensor, previous: Tensor | None
) -> Count:
    """Write the mask of a parameter: zero what lies before the cut, leave the rest.

    Args:
        part: the local part; all of it is written, not only what is counted.
        position: of the parameter in the caller's list.
        cut: where the order is cut.
        out: flat mask, any dtype; contiguous.
        previous: flat mask whose values survivors keep; None: they become 1. It may be ``out``.

    Returns:
        How many counted live elements were pruned.
    """

    pieces = list(_pieces([part], only_counted=False))
    kernel = kernels_on(part.device).write
    calls = [partial(kernel, part, span, position, cut, out, previous) for _, span in pieces]
    pruned = _for_each(calls, _threads_for([part], pieces))
    return sum(
        number
        for (_, span), number in zip(pieces, pruned, strict=True)
        if span.start in part.counted
    )


def _chunks(positions: range, device: torch.device, itemsize: int) -> Iterator[range]:
    most = max(1, (_CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK) // itemsize)
    # Of equal size: each costs some calls, however small it is.
    size = -(-len(positions) // max(1, -(-len(positions) // most)))
    for start in range(positions.start, positions.stop, max(1, size)):
        yield range(start, min(start + size, positions.stop))


def _local_chunks(part: Candidates) -> Iterator[range]:
    """Chunks of all local elements, none of them counted in part only."""
    counted = part.counted
    for positions in (range(counted.start), counted, range(counted.stop, part.num_local)):
        yield from _chunks(positions, part.device, part.keys.dtype.itemsize)


def _on_cpu(tensors: Sequence[Tensor]) -> Tensor:
    """1-d tensors joined to one; they come over from a device together."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if all(tensor.device.type == "cpu" for tensor in filled):
        return concatenate(filled)
    return torch.cat([tensor.to(filled[0].device) for tensor in filled]).cpu()


def _pieces(parts: Sequence[Candidates], *, only_counted: bool) -> Iterator[tuple[int, range]]:
    """(position of the part, flat positions) of every chunk of every part."""
    for position, part in enumerate(parts):
        spans = (
            _chunks(part.counted, part.device, part.keys.dtype.itemsize)
            if only_counted
            else _local_chunks(part)
        )
        for span in spans:
            yield position, span


def _threads_for(parts: Sequence[Candidates], pieces: Sequence[tuple[int, range]]) -> int:
    """How many threads to visit the chunks with."""
    if not _on_threads(parts):
        return 1
    num_bytes = sum(len(span) * parts[position].keys.dtype.itemsize for position, span in pieces)
    return _num_threads(num_bytes, len(pieces))


def _on_threads(parts: Sequence[Candidates]) -> bool:
    """Whether numpy reads them all, which lets others run meanwhile."""
    return all(part.keys.is_thread_safe and part.device.type == "cpu" for part in parts)


def _num_threads(num_bytes: int, num_pieces: int) -> int:
    """As many as torch would use, if there is enough to read for each in every piece."""
    if num_bytes < _THREADED_PIECE * num_pieces:
        return 1
    return min(torch.get_num_threads(), _MAX_THREADS, num_pieces)


def _for_each(calls: Sequence[Callable[[Scratch], R]], num_threads: int) -> list[R]:
    """Call all with a thread's scratch memory; results in the order of the calls."""
    results: list[R | None] = [None] * len(calls)
    errors: list[BaseException] = []
    # One iterator for all: a thread takes the next call when it has time.
    todo = iter(enumerate(calls))

    def work() -> None:
        scratch = Scratch()
        try:
            for i, call in todo:
                results[i] = call(scratch)
                if errors:
                    return
        except BaseException as error:
            errors.append(error)

    others = [threading.Thread(target=work) for _ in range(num_threads - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]
