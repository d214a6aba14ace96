"""The passes over the scores: chunk by chunk, so that scratch memory does not grow.

Selection decides what to count and what to write; a pass does it for this rank's part,
see kernels.py for what is done to a chunk.

[Note: draft] The read that counts around the k-th key writes masks too, as if the cut were
where its interval begins: nearly all elements lie on one side of the interval, and are
never looked at again. Once the cut is known, only those that were found in the interval are
set right. Masks are new tensors until all ranks have theirs, so a draft can be thrown away.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from distprune import kernels
from distprune.kernels import Candidates, Count, Cut, Found, Interval
from distprune.memory import Scratch, concatenate

T = TypeVar("T")

# Elements per chunk: on a CPU keys and flags stay in the second-level cache, or nearly, and the
# calls of several threads do not wait for each other; on an accelerator launches are few and
# scratch stays under a gigabyte.
_CPU_CHUNK = 1 << 18
_DEVICE_CHUNK = 1 << 24
# More threads than this spend their time on waiting for the interpreter's lock.
_MAX_THREADS = 8


@dataclass(frozen=True)
class Reading:
    """What one read of this rank's parameters told.

    Attributes:
        counts: per parameter, the counted live keys <= each pivot.
        num_below: per parameter, the counted live keys below the interval; 0 without one.
        interval: of keys.
        found: per parameter, what lies in the interval, chunk by chunk.
        keys: per parameter, the counted keys in the interval, 1-d, on the CPU.
    """

    counts: list[list[int]]
    num_below: list[int]
    interval: Interval | None
    found: list[list[Found]]
    keys: list[Tensor]


def count_live(live: Tensor | None, counted: range) -> int:
    """Elements of a flat mask, among the counted ones, that compete."""
    return count_each_live([live], [counted])[0]


def count_each_live(live: Sequence[Tensor | None], counted: Sequence[range]) -> list[int]:
    """The same of several masks; they come over from a device together."""

    def visit(which: int, span: range, scratch: Scratch) -> Count:
        return kernels.count_live(live[which][span.start : span.stop], scratch)

    work = [
        (which, span)
        for which, (mask, positions) in enumerate(zip(live, counted, strict=True))
        if mask is not None
        for span in _chunks(positions, mask.device)
    ]
    on_cpu = all(mask is None or mask.device.type == "cpu" for mask in live)
    numbers = kernels.on_host(_for_each(visit, work, is_threaded=on_cpu))
    totals = [
        len(positions) if mask is None else 0 for mask, positions in zip(live, counted, strict=True)
    ]
    for (which, _), number in zip(work, numbers, strict=True):
        totals[which] += number
    return totals


def read(
    parts: Sequence[Candidates],
    pivots: Sequence[int],
    interval: Interval | None,
    drafts: Sequence[Tensor] | None = None,
    expected_share: float = 1.0,
) -> Reading:
    """One read of the counted elements, or of all local ones if there are drafts to write.

    Args:
        parts: this rank's parameters.
        pivots: keys.
        interval: closed interval of keys to collect, or None.
        drafts: flat masks, uninitialised, one per part: see [Note: draft]. Written if there is
            an interval.
        expected_share: of all elements, that the interval is expected to hold. Where a device
            meets many more in a chunk, that chunk is read again.
    """
    writes = drafts is not None and interval is not None

    def visit(
        which: int, span: range, scratch: Scratch, *, is_again: bool = False
    ) -> tuple[int, kernels.ChunkRead]:
        out = drafts[which] if writes else None
        room = None if is_again else min(len(span), int(4 * expected_share * len(span)) + 1024)
        return which, kernels.read(parts[which], span, pivots, interval, out, scratch, room)

    chunks = _for_each_chunk(visit, parts, only_counted=not writes)
    numbers = iter(
        kernels.on_host(
            [
                count
                for _, chunk in chunks
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
    for which, chunk in chunks:
        number = next(numbers)
        row = [next(numbers) for _ in range(1 + len(pivots))]
        if chunk.found is None or chunk.found.is_counted:
            totals[which] = [total + count for total, count in zip(totals[which], row, strict=True)]
        if chunk.found is not None and number:
            here = chunk.found
            if number > here.positions.numel():
                here = visit(which, here.span, Scratch(), is_again=True)[1].found
            found[which].append(here.first(number))
    return Reading(
        [row[1:] for row in totals],
        [row[0] for row in totals],
        interval,
        found,
        _on_cpu([[here.keys for here in each if here.is_counted] for each in found]),
    )


def finish(
    reading: Reading, part: Candidates, position: int, cut: Cut, draft: Tensor
) -> Count | None:
    """Make a draft of a mask final, without another read; see [Note: draft].

    Args:
        reading: the read that wrote it.
        part: the parameter.
        position: of the parameter in the list that was read, and cut.
        cut: where the order is cut.
        draft: flat mask of the part, all of it.

    Returns:
        How many counted live elements were pruned; None if the cut lies elsewhere, and the mask
        has to be written anew.

    Cost: what was found in the interval is looked at, and nothing else.
    """
    assert reading.interval is not None
    low, high = reading.interval
    num_pruned: Count = reading.num_below[position]
    if low <= cut.threshold <= high:
        for found in reading.found[position]:
            number = kernels.prune_found(part, position, cut, found, draft)
            if found.is_counted:
                num_pruned = num_pruned + number
        return num_pruned
    kept_from = cut.threshold + 1 if position < cut.parameter else cut.threshold
    is_exact = position != cut.parameter or cut.index == 0
    return num_pruned if is_exact and kept_from == low else None


def indices_at(part: Candidates, key: int, low: int, high: int) -> Iterator[Tensor]:
    """Global indices in [low, high) of the counted live elements with a key, chunk by chunk."""
    scratch = Scratch()
    for span in _chunks(part.counted, part.device):
        positions = kernels.positions_of(part, span, key, scratch)
        if positions.numel():
            indices = part.index(positions)
            yield indices[(indices >= low) & (indices < high)].cpu()


def sample(
    parts: Sequence[Candidates], rate: float, dead: int, generator: np.random.Generator
) -> Tensor:
    """Keys of about that share of the counted elements of all parameters, 1-d, on the CPU.

    ``dead`` stands for an element that does not compete.
    """
    drawn = [_sample_one(part, rate, dead, generator) for part in parts]
    return concatenate(_on_cpu([drawn]))


def _sample_one(part: Candidates, rate: float, dead: int, generator: np.random.Generator) -> Tensor:
    """Its keys, on its device, from all over the counted elements.

    Sixteen neighbours are read per place, as a cache line brings them anyway.
    """
    num_counted = len(part.counted)
    burst = 16 if num_counted >= 4096 else 1
    num_rows = num_counted // burst
    wanted = math.ceil(num_counted * rate) / burst
    num_drawn = min(num_rows, int(wanted) + int(generator.random() < wanted % 1))
    if num_drawn == 0:
        return torch.empty(0, dtype=torch.int64)
    # One place per stratum, jittered: regular data cannot hide between the places.
    places = np.arange(num_drawn) + generator.random(num_drawn)
    rows = np.minimum((places * (num_rows / num_drawn)).astype(np.int64), num_rows - 1)
    positions = (rows[:, None] * burst + np.arange(burst)).reshape(-1) + part.counted.start
    return kernels.gather(part, torch.from_numpy(positions).to(part.device), dead)


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

    def visit(_: int, span: range, scratch: Scratch) -> Count:
        num_pruned = kernels.write(part, span, position, cut, out, previous, scratch)
        return num_pruned if span.start in part.counted else 0

    return sum(_for_each_chunk(visit, [part], only_counted=False))


def _chunks(positions: range, device: torch.device) -> Iterator[range]:
    size = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    for start in range(positions.start, positions.stop, size):
        yield range(start, min(start + size, positions.stop))


def _local_chunks(part: Candidates, num_local: int) -> Iterator[range]:
    """Chunks of all local elements, none of them counted in part only."""
    for positions in (
        range(part.counted.start),
        part.counted,
        range(part.counted.stop, num_local),
    ):
        yield from _chunks(positions, part.device)


def _on_cpu(tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Each list of 1-d tensors joined to one; they come over from a device together."""
    filled = [[tensor for tensor in each if tensor.numel()] for each in tensors]
    flat = [tensor for each in filled for tensor in each]
    if all(tensor.device.type == "cpu" for tensor in flat):
        return [concatenate(each) for each in filled]
    sizes = [sum(tensor.numel() for tensor in each) for each in filled]
    return list(torch.cat([tensor.to(flat[0].device) for tensor in flat]).cpu().split(sizes))


def _for_each_chunk(
    visit: Callable[[int, range, Scratch], T], parts: Sequence[Candidates], *, only_counted: bool
) -> list[T]:
    """Visit every chunk of every part."""
    work = [
        (which, span)
        for which, part in enumerate(parts)
        for span in (
            _chunks(part.counted, part.device)
            if only_counted
            else _local_chunks(part, part.num_local)
        )
    ]
    is_threaded = all(part.keys.is_thread_safe and part.device.type == "cpu" for part in parts)
    return _for_each(visit, work, is_threaded=is_threaded)


def _for_each(
    visit: Callable[[int, range, Scratch], T],
    work: Sequence[tuple[int, range]],
    *,
    is_threaded: bool,
) -> list[T]:
    """Results in the order of the work, on a thread for each large chunk's worth of it."""
    num_elements = sum(len(span) for _, span in work)
    num_threads = min(torch.get_num_threads(), _MAX_THREADS, 1 + num_elements // _CPU_CHUNK)
    if not is_threaded:
        num_threads = 1
    results: list[T | None] = [None] * len(work)
    errors: list[BaseException] = []
    # One iterator for all: a thread takes the next chunk when it has time.
    todo = iter(enumerate(work))

    def take() -> None:
        scratch = Scratch()
        try:
            for i, (which, span) in todo:
                results[i] = visit(which, span, scratch)
                if errors:
                    return
        except BaseException as error:
            errors.append(error)

    others = [threading.Thread(target=take) for _ in range(num_threads - 1)]
    for thread in others:
        thread.start()
    take()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]
