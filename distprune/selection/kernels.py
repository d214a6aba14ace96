"""The functions that touch every element, in two forms: numpy's on a CPU, torch's elsewhere.

cpu.py and device.py are two implementations of :class:`Kernels`, with the same results. Everything
else in this room is written once, and gets the functions for a device from :func:`kernels_on`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from distprune._common import memory
from distprune._common.element_groups import Groups
from distprune._common.memory import Count, Runs, Scratch
from distprune.selection import cpu, device
from distprune.selection.candidates import Candidates, ChunkScan, Collected, Cut, Interval
from distprune.selection.keys import KeyRange


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


def kernels_on(where: torch.device) -> Kernels:
    """The functions for chunks on a device."""
    return cpu if memory.takes_numpy(where) else device
