"""The values that selection works on: candidates, cuts, and what a look at a chunk tells."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from distprune._common.memory import Count, Places, Scratch
from distprune.selection.keys import Keys
from distprune.shards.geometry import IndexMap

# Closed interval of keys.
Interval = tuple[int, int]


class KeySource(Protocol):
    """Where the keys of one local shard come from; see keys.py."""

    is_thread_safe: bool
    dtype: torch.dtype

    def load(self, start: int, stop: int, scratch: Scratch | None = None) -> Keys: ...

    def gather(self, places: Places) -> Tensor: ...


@dataclass(frozen=True)
class Candidates:
    """One rank's part of one parameter, as selection sees it.

    Attributes:
        keys: of the flat local elements.
        live: flat mask in force; 1 = competes. None: all do.
        index: from flat positions to global indices.
        counted: the flat positions that this rank counts (replicas share).
        num_local: elements of this part ...
        numel: ... and of the whole parameter.
        device: of the keys.
    """

    keys: KeySource
    live: Tensor | None
    index: IndexMap
    counted: range
    num_local: int
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


@dataclass(frozen=True)
class PartCut:
    """The cut that decides the mask of one parameter.

    Attributes:
        position: of the parameter in the list whose order was cut.
        cut: where the order of that list is cut.
        bound: "min_sparsity" or "max_sparsity" if this bound decided how many elements are pruned;
            None if the common cut did.
    """

    position: int
    cut: Cut
    bound: str | None = None


@dataclass(frozen=True)
class Found:
    """The live elements of one chunk whose keys lie in an interval.

    Attributes:
        span: flat positions of the chunk.
        positions: integers [m] from where the chunk begins.
        keys: [m].
        is_counted: whether this rank counts them.
        number: how many there are. A device may have had room for fewer, or more than enough
            (then the rest of ``positions`` and ``keys`` means nothing).
    """

    span: range
    positions: Tensor
    keys: Tensor
    is_counted: bool
    number: Count

    def first(self, number: int) -> Found:
        """The same with what means something, once it is known how much does."""
        return replace(
            self, positions=self.positions[:number], keys=self.keys[:number], number=number
        )


@dataclass(frozen=True)
class ChunkScan:
    """What a scan of one chunk counted and collected.

    Attributes:
        counts: live keys <= each pivot.
        num_below: live keys below the interval; 0 without one.
        found: what lies in the interval; None without one.
    """

    counts: list[Count]
    num_below: Count
    found: Found | None


def are_bool(out: Tensor, previous: Tensor | None) -> bool:
    """Whether a mask and the one before it are bool, so that flags can be compared into it."""
    return out.dtype is torch.bool and (previous is None or previous.dtype is torch.bool)
