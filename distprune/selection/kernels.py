"""The functions that touch every element, in three forms, with the same results.

cpu.py and device.py are two implementations of :class:`Kernels`: numpy's on a CPU, and torch's
operations elsewhere. triton_kernels.py is one of :class:`FusedKernels`, which does the work of some
of these functions for many chunks at once, on devices that Triton compiles for. Everything else in
this room is written once, and gets the functions for a device from :func:`kernels_on` and
:func:`fused_on`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from distprune._common import memory
from distprune._common.element_groups import Groups
from distprune._common.memory import Count, Runs, Scratch
from distprune.selection import cpu, device
from distprune.selection.candidates import Candidates, ChunkScan, Collected, Cut, Interval
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
        groups: Groups,
        keys: KeyRange,
        out: Tensor,
        scratch: Scratch,
    ) -> tuple[Count, Count]:
        """Write the mask of whole groups: the mask in force, with the lowest of each group pruned.

        Args:
            part, span, scratch: as for :meth:`scan`; this rank may count some of the elements.
            groups: whose blocks are in the span, one after the other. Elements that are pruned
                already are the lowest of their groups.
            keys: the range of all keys.
            out: flat mask of the whole part.

        Returns:
            How many counted elements were pruned; and how many of the live ones are NaN.
        """

    def positions_of(self, part: Candidates, span: range, key: int, scratch: Scratch) -> Tensor:
        """Flat positions, int64 [m], of the live elements of a chunk that have a key."""

    def count_key(
        self, part: Candidates, span: range, key: int, cuts: Sequence[int], scratch: Scratch
    ) -> list[Count]:
        """Count the live elements of pieces of a chunk that have a key.

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

    def can_cut(self, part: Candidates, position: int, cut: Cut) -> bool:
        """Whether :meth:`write` and :meth:`prune_collected` can find the ties before the cut."""

    def write(
        self,
        parts: Sequence[Candidates],
        chunks: Sequence[tuple[int, range]],
        cuts: Sequence[tuple[int, Cut]],
        outs: Sequence[Tensor],
    ) -> list[Tensor]:
        """:meth:`Kernels.write` of some chunks; survivors keep the values of the masks in force.

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
    ) -> list[Tensor]:
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
    operations give (see triton_check.py), which is logged as a warning; and if the environment
    variable DISTPRUNE_NO_TRITON is set.
    """
    if memory.takes_numpy(where) or where.type not in ("cuda", "xpu"):
        return None
    if os.environ.get(NO_TRITON, "0") not in ("", "0"):
        return None
    return _compiled_on(where)


@functools.cache
def _compiled_on(where: torch.device) -> FusedKernels | None:
    try:
        from distprune.selection import triton_check, triton_kernels

        triton_check.check_on(where)
    except Exception as error:  # Triton, its compiler and the driver raise errors of many types
        logger.warning(
            "Triton's kernels are not used on %s (%s: %s); torch operations are used, which move "
            "several times as many bytes. Set %s=1 to say that this is meant.",
            where, type(error).__name__, error, NO_TRITON,
        )  # fmt: skip
        return None
    return triton_kernels
