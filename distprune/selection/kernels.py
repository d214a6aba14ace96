"""The functions that touch every element, in three forms, and the loop that calls them for chunks.

cpu.py and device.py are two implementations of :class:`Kernels`: numpy's on a CPU, and torch's
operations elsewhere. triton_kernels.py is one of :class:`FusedKernels`, which does the work of some
of these functions for many chunks at once, on devices that Triton compiles for. All give the same
results. Everything else in this room is written once, and gets the functions for a device from
:func:`kernels_on` and :func:`fused_on`.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.blocks import Blocks
from distprune.base.memory import Count, Runs, Scratch
from distprune.selection import cpu, device
from distprune.selection.candidates import Candidates, ChunkScan, Collected, Cut, Draw, Interval
from distprune.selection.keys import KeyRange

logger = logging.getLogger(__name__)

# Set to anything but 0 or nothing, devices use torch's operations alone.
NO_TRITON = "DISTPRUNE_NO_TRITON"


class Kernels(Protocol):
    """What is done to one chunk of one parameter.

    Attributes:
        CHUNK_BYTES: bytes of keys in a chunk, about.
        USES_THREADS: whether chunks can be visited by several threads.
    """

    CHUNK_BYTES: int
    USES_THREADS: bool

    def count_live(self, live: Tensor, scratch: Scratch) -> Count:
        """Count the elements of a chunk of a mask that are exactly 1."""

    def scan(
        self,
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
            part: the parameter that the chunk belongs to.
            span: flat positions of the chunk; this rank counts all of them or none.
            pivots: keys to count up to.
            interval: of keys to collect, if any.
            out: flat mask of the whole part, uninitialised. The span of it becomes the mask in
                force with everything below the interval pruned; needs an interval.
            scratch: memory to use again.
            capacity: how many elements a device may collect without waiting for their number;
                None: it waits, and collects all. A CPU always collects all.
        """

    def write(
        self,
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
            part, span, scratch: as for :meth:`scan`.
            position: of the parameter in the list that was cut.
            cut: where the order of the list is cut.
            out: flat mask of the whole part.
            previous: flat mask whose values survivors keep; None: they become 1. It may be ``out``.

        Returns:
            How many live elements were pruned.
        """

    def prune_collected(
        self, part: Candidates, position: int, cut: Cut, collected: Collected, out: Tensor
    ) -> Count:
        """Prune those of the collected elements that come before the cut.

        Args:
            part, position, cut: as for :meth:`write`.
            collected: elements that are 1 in ``out``.
            out: flat mask of the whole part.

        Returns:
            How many were pruned.
        """

    def write_lowest(
        self,
        part: Candidates,
        span: range,
        blocks: Blocks,
        keys: KeyRange,
        out: Tensor,
        scratch: Scratch,
    ) -> tuple[Count, Count]:
        """Write the mask of whole blocks: the mask in force, with the lowest of each block pruned.

        Args:
            part, span, scratch: as for :meth:`scan`; this rank may count some of the elements.
            blocks: whose bands are in the span, one after the other. Elements that are pruned
                already are the lowest of their blocks.
            keys: the range of all keys.
            out: flat mask of the whole part.

        Returns:
            How many counted elements were pruned; and how many of the live ones are NaN.
        """

    def positions_of(self, part: Candidates, span: range, key: int, scratch: Scratch) -> Tensor:
        """Flat positions, int64 [m], of the live elements of a chunk that have a key."""

    def count_key(
        self, part: Candidates, span: range, key: int, cuts: Sequence[int], scratch: Scratch
    ) -> list[int]:
        """Count the live elements of pieces of a chunk that have a key; waits for a device.

        Args:
            cuts: where the pieces begin and end, from the beginning of the chunk, ascending.
        """

    def gather(self, part: Candidates, runs: Runs, dead: int) -> Tensor:
        """Keys of some runs of elements, 1-d; ``dead`` where an element does not compete."""


class FusedKernels(Protocol):
    """What is done to chunks of many parameters in one launch, reading each score once."""

    def takes(self, part: Candidates, out: Tensor | None) -> bool:
        """Whether the functions below can read a part, and write its mask.

        For the others there are :class:`Kernels`.
        """

    def is_in_memory(self, part: Candidates) -> bool:
        """Whether a chunk takes no memory, so that chunks may be large."""

    def scan(
        self,
        parts: Sequence[Candidates],
        chunks: Sequence[tuple[int, range]],
        pivots: Sequence[int],
        interval: Interval | None,
        outs: Sequence[Tensor] | None,
        expected_share: float,
    ) -> list[ChunkScan]:
        """:meth:`Kernels.scan` of some chunks; waits for each device once.

        Args:
            parts: this rank's parameters.
            chunks: position of the part, and span; of parts that are taken.
            pivots, interval: as for :meth:`Kernels.scan`.
            outs: flat masks, uninitialised, one per part.
            expected_share: about which fraction of the elements lies in the interval. If there are
                more, some scores are read twice.

        Returns:
            Counts on the host, and exactly what lies in the interval; in the order of the chunks.
        """

    def sample(
        self, parts: Sequence[Candidates], draws: Sequence[Draw], dead: int, salt: int
    ) -> list[Tensor]:
        """Keys of drawn elements of parts that are taken and in memory; does not wait.

        Args:
            parts: this rank's parameters.
            draws: where to draw, in each stratum at a pseudo-random place.
            dead: the key that stands for an element that does not compete.
            salt: of the places.

        Returns:
            1-d tensors on the parts' devices, in no order.
        """

    def histogram(self, keys: Tensor, low: int, high: int, shift: int) -> Tensor:
        """int64, on their device: those keys that lie in [low, high], by bin of 2**shift keys."""

    def can_cut(self, part: Candidates, position: int, cut: Cut) -> bool:
        """Whether :meth:`write` and :meth:`prune_collected` can find the ties before the cut."""

    def write(
        self,
        parts: Sequence[Candidates],
        chunks: Sequence[tuple[int, range]],
        cuts: Sequence[tuple[int, Cut]],
        outs: Sequence[Tensor],
    ) -> list[int]:
        """:meth:`Kernels.write` of some chunks; survivors keep the values of the masks in force.

        Waits for each device once.

        Args:
            parts, chunks, outs: as for :meth:`scan`.
            cuts: per part, its position in the list that was cut, and the cut.

        Returns:
            Per part, how many live elements were pruned that this rank counts.
        """

    def prune_collected(
        self,
        parts: Sequence[Candidates],
        collected: Mapping[int, Sequence[Collected]],
        cut: Cut,
        outs: Sequence[Tensor],
    ) -> list[int]:
        """:meth:`Kernels.prune_collected` of all chunks, by position of their part.

        Returns:
            As :meth:`write`.
        """


def kernels_on(where: torch.device) -> Kernels:
    """The functions for chunks on a device."""
    return cpu if memory.takes_numpy(where) else device


def fused_on(where: torch.device) -> FusedKernels | None:
    """The kernels that read each score once, where there are some for a device.

    None on a CPU; where Triton is not installed, cannot compile, or does not give what torch's
    operations give, which is logged as a warning; and if the environment variable
    DISTPRUNE_NO_TRITON is set to anything but 0 or nothing.
    """
    if memory.takes_numpy(where) or where.type not in ("cuda", "xpu"):
        return None
    return _compiled_on(where) if os.environ.get(NO_TRITON, "0") in ("", "0") else None


@functools.cache
def _compiled_on(where: torch.device) -> FusedKernels | None:
    try:
        from distprune.selection import triton_kernels

        triton_kernels.check_on(where)
    except Exception as error:  # Triton, its compiler and the driver raise errors of many types
        logger.warning(
            "Triton's kernels are not used on %s (%s: %s); torch operations are used, which move "
            "several times as many bytes. Set %s=1 to say that this is meant.",
            where, type(error).__name__, error, NO_TRITON,
        )  # fmt: skip
        return None
    return triton_kernels


def fused_for(
    parts: Sequence[Candidates],
    outs: Sequence[Tensor] | None,
    cuts: Sequence[tuple[int, Cut]] | None = None,
) -> tuple[FusedKernels | None, dict[int, Candidates]]:
    """Fused kernels, if there are any, and the parts to use them for by position.

    Args:
        outs: the masks to write, if any.
        cuts: per part, its position in the list that was cut, and the cut; if it is known.
    """
    found: FusedKernels | None = None
    taken: dict[int, Candidates] = {}
    of_devices = {device: fused_on(device) for device in {part.device for part in parts}}
    if not any(of_devices.values()):
        return None, taken
    for position, part in enumerate(parts):
        fused = of_devices[part.device]
        if fused is None or not fused.takes(part, None if outs is None else outs[position]):
            continue
        if cuts is None or fused.can_cut(part, *cuts[position]):
            found = fused
            taken[position] = part
    return found, taken


def histogram_on_device(keys: Tensor, low: int, high: int, shift: int) -> Tensor:
    """int64, on the host: those keys that lie in [low, high], by their bin of 2**shift keys."""
    counts = (fused_on(keys.device) or device).histogram(keys, low, high, shift)
    return counts.cpu()


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
