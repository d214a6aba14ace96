"""Chunks of this rank's parameters, and the loop that calls a kernel for each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from distprune._common.memory import Scratch
from distprune.selection.candidates import Candidates
from distprune.selection.kernels import FusedKernels, kernels_on

R = TypeVar("R")

# With smaller chunks, threads would wait for each other more than they work.
_THREADED_CHUNK = 1 << 19  # bytes
# More threads than this spend their time on waiting for the interpreter's lock.
_MAX_THREADS = 8
# Elements: positions in a chunk are 32-bit integers. A power of two, which keeps chunks aligned.
_LARGEST_FUSED = 1 << 30


def spans_of(positions: range, device: torch.device, itemsize: int) -> Iterator[range]:
    """Cut a range of flat positions into chunks of about equal size."""
    largest = max(1, kernels_on(device).CHUNK_BYTES // itemsize)
    # Of equal size: each costs some calls, however small it is.
    size = -(-len(positions) // max(1, -(-len(positions) // largest)))
    for start in range(positions.start, positions.stop, max(1, size)):
        yield range(start, min(start + size, positions.stop))


def counted_spans(part: Candidates) -> Iterator[range]:
    """Chunks of the elements that this rank counts."""
    return spans_of(part.counted, part.device, part.keys.dtype.itemsize)


def chunks_of(
    parts: Sequence[Candidates], *, only_counted: bool, positions: Iterable[int] | None = None
) -> list[tuple[int, range]]:
    """(position of the part, span) of every chunk of some parts.

    Args:
        only_counted: leave out what other ranks count. Otherwise a chunk is counted as a whole,
            or not at all.
        positions: of the parts; None: all.
    """
    chunks = []
    for position in range(len(parts)) if positions is None else positions:
        part = parts[position]
        for each in _counted_or_not(part, only_counted):
            spans = spans_of(each, part.device, part.keys.dtype.itemsize)
            chunks += [(position, span) for span in spans]
    return chunks


def fused_chunks_of(
    kernels: FusedKernels,
    parts: Sequence[Candidates],
    positions: Iterable[int],
    *,
    only_counted: bool,
) -> list[tuple[int, range]]:
    """:func:`chunks_of` for fused kernels: as large as can be, where that takes no memory."""
    chunks = []
    for position in positions:
        part = parts[position]
        if not kernels.is_in_memory(part):
            chunks += chunks_of(parts, only_counted=only_counted, positions=[position])
            continue
        for each in _counted_or_not(part, only_counted):
            for start in range(each.start, each.stop, _LARGEST_FUSED):
                chunks.append((position, range(start, min(start + _LARGEST_FUSED, each.stop))))
    return chunks


def _counted_or_not(part: Candidates, only_counted: bool) -> list[range]:
    """What this rank counts of a part, and with it what it does not."""
    counted = part.counted
    if only_counted:
        return [counted]
    return [range(counted.start), counted, range(counted.stop, part.num_local)]


def num_threads_for(parts: Sequence[Candidates], chunks: Sequence[tuple[int, range]]) -> int:
    """How many threads to visit chunks of parameters with."""
    if not all(p.keys.is_thread_safe and kernels_on(p.device).USES_THREADS for p in parts):
        return 1
    num_bytes = sum(len(span) * parts[position].keys.dtype.itemsize for position, span in chunks)
    return num_threads(num_bytes, len(chunks))


def num_threads(num_bytes: int, num_chunks: int) -> int:
    """As many as torch would use, if chunks are large enough."""
    if num_bytes < _THREADED_CHUNK * num_chunks:
        return 1
    return min(torch.get_num_threads(), _MAX_THREADS, num_chunks)


def call_all(calls: Sequence[Callable[[Scratch], R]], num_threads: int) -> list[R]:
    """Call all with a thread's scratch memory; results in the order of the calls."""
    if num_threads == 1:
        scratch = Scratch()
        return [call(scratch) for call in calls]
    results: dict[int, R] = {}
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
    return [results[i] for i in range(len(calls))]
