"""The passes over the scores: chunk by chunk, so that scratch memory does not grow.

Selection decides what to count and what to write; a pass does it for this rank's part,
see kernels.py for what is done to a chunk.

[Note: draft] The read that counts around the k-th key writes masks too, as if the cut were
where its interval begins: nearly all elements lie on one side of the interval, and are
never looked at again. Once the cut is known, only those that were found in the interval are
set right. Masks are new tensors until all ranks have theirs, so a draft can be thrown away.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from distprune import kernels
from distprune.kernels import Candidates, Count, Cut, Found, Interval
from distprune.memory import Scratch

T = TypeVar("T")

# Elements per chunk: on a CPU keys and flags stay in the second-level cache, or nearly, and the
# calls of several threads do not wait for each other; on an accelerator launches are few and
# scratch stays under a gigabyte.
_CPU_CHUNK = 1 << 18
_DEVICE_CHUNK = 1 << 24


@dataclass(frozen=True)
class Reading:
    """What one read of this rank's parameters told.

    Attributes:
        counts: per parameter, the counted live keys <= each pivot.
        num_below: per parameter, the counted live keys below the interval; 0 without one.
        found: per parameter, what lies in the interval, chunk by chunk.
        interval: of keys.
    """

    counts: list[list[int]]
    num_below: list[int]
    found: list[list[Found]]
    interval: Interval | None

    def counted(self) -> Iterator[Tensor]:
        """The keys found in the interval that this rank counts, 1-d, on the CPU."""
        for which in range(len(self.found)):
            yield from self.counted_of(which)

    def counted_of(self, which: int) -> Iterator[Tensor]:
        """The same of one parameter."""
        for found in self.found[which]:
            if found.is_counted:
                yield found.keys.cpu()


def count_live(live: Tensor | None, counted: range) -> int:
    """Elements of a flat mask, among the counted ones, that compete."""
    if live is None:
        return len(counted)
    spans = [(0, span) for span in _chunks(counted, live.device)]
    return sum(
        _on_host(
            _for_each(
                lambda _, span, scratch: kernels.count_live(live[span.start : span.stop], scratch),
                spans,
                is_threaded=live.device.type == "cpu",
            )
        )
    )


def read(
    parts: Sequence[Candidates],
    pivots: Sequence[int],
    interval: Interval | None,
    drafts: Sequence[Tensor] | None = None,
) -> Reading:
    """One read of the counted elements, or of all local ones if there are drafts to write.

    Args:
        parts: this rank's parameters.
        pivots: keys.
        interval: closed interval of keys to collect, or None.
        drafts: flat masks, uninitialised, one per part: see [Note: draft]. Written if there is
            an interval.
    """
    writes = drafts is not None and interval is not None

    def visit(which: int, span: range, scratch: Scratch) -> tuple[int, kernels.ChunkRead]:
        out = drafts[which] if writes else None
        return which, kernels.read(parts[which], span, pivots, interval, out, scratch)

    rows: list[tuple[int, list[Count]]] = []
    found: list[list[Found]] = [[] for _ in parts]
    for which, chunk in _for_each_chunk(visit, parts, only_counted=not writes):
        if chunk.found is not None and chunk.found.positions.numel():
            found[which].append(chunk.found)
        if chunk.found is None or chunk.found.is_counted:
            rows.append((which, [chunk.num_below, *chunk.counts]))
    totals = [[0] * (1 + len(pivots)) for _ in parts]
    numbers = iter(_on_host([count for _, row in rows for count in row]))
    for which, row in rows:
        for j in range(len(row)):
            totals[which][j] += next(numbers)
    return Reading([row[1:] for row in totals], [row[0] for row in totals], found, interval)


def finish(
    reading: Reading, part: Candidates, position: int, cut: Cut, draft: Tensor
) -> int | None:
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
    """
    assert reading.interval is not None
    low, high = reading.interval
    num_pruned = reading.num_below[position]
    if low <= cut.threshold <= high:
        cleared = [
            (kernels.prune_found(part, position, cut, found, draft), found.is_counted)
            for found in reading.found[position]
        ]
        return num_pruned + sum(_on_host([count for count, is_counted in cleared if is_counted]))
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


def sample(part: Candidates, size: int, generator: np.random.Generator) -> Tensor:
    """About ``size`` live keys from all over the counted elements, 1-d, on the CPU.

    Sixteen neighbours are read per place, as a cache line brings them anyway.
    """
    num_counted = len(part.counted)
    burst = 16 if num_counted >= 4096 else 1
    num_rows = num_counted // burst
    wanted = size / burst
    num_drawn = min(num_rows, int(wanted) + int(generator.random() < wanted % 1))
    if num_drawn == 0:
        return torch.empty(0, dtype=torch.int64)
    # One place per stratum, jittered: regular data cannot hide between the places.
    places = np.arange(num_drawn) + generator.random(num_drawn)
    rows = np.minimum((places * (num_rows / num_drawn)).astype(np.int64), num_rows - 1)
    positions = (rows[:, None] * burst + np.arange(burst)).reshape(-1) + part.counted.start
    return kernels.gather(part, torch.from_numpy(positions).to(part.device)).cpu()


def write_keep(
    part: Candidates, position: int, cut: Cut, out: Tensor, previous: Tensor | None
) -> int:
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

    return sum(_on_host(_for_each_chunk(visit, [part], only_counted=False)))


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


def _on_host(counts: Sequence[Count]) -> list[int]:
    """Counts as numbers: those of a device come over together."""
    waiting = [count for count in counts if isinstance(count, Tensor)]
    if not waiting:
        return list(counts)
    arrived = iter(torch.stack(waiting).tolist())
    return [next(arrived) if isinstance(count, Tensor) else count for count in counts]


def _for_each_chunk(
    visit: Callable[[int, range, Scratch], T], parts: Sequence[Candidates], *, only_counted: bool
) -> list[T]:
    """Visit every chunk of every part, on as many threads as torch would use."""
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
    """Results in the order of the work."""
    num_threads = min(torch.get_num_threads(), len(work)) if is_threaded else 1
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
