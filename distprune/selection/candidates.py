"""The values that selection works on: candidates, cuts, and what the scan of a chunk returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.memory import INTEGERS, SERIAL, Count, Runs, Scratch
from distprune.ranks.collectives import Communicator
from distprune.selection.keys import KeyRange, Keys, ScoreKeys
from distprune.shards.geometry import IndexMap
from distprune.shards.shard import Shard

# Parts of more elements are visited one by one; see small.py.
MOST_ELEMENTS = SERIAL
# Closed interval of keys.
Interval = tuple[int, int]


@dataclass(frozen=True)
class Draw:
    """Which elements of a part to sample: one run in each stratum.

         start
          |  0  |  1  |  2  |  3  |  4  |  5  | rest      runs of ``length`` elements
          |     x     |        x  |  x        |           a run of each of ``num_drawn`` strata

    Attributes:
        position: of the part.
        start: the flat position of the first run.
        length: of a run.
        num_runs, num_drawn: how many there are, and how many are drawn; at least 1.
    """

    position: int
    start: int
    length: int
    num_runs: int
    num_drawn: int


class KeySource(Protocol):
    """Where the keys of one local shard come from; see keys.py."""

    is_thread_safe: bool
    dtype: torch.dtype

    def load(self, start: int, stop: int, scratch: Scratch | None = None) -> Keys: ...

    def gather(self, runs: Runs) -> Tensor: ...


@dataclass(frozen=True)
class Candidates:
    """One rank's part of one parameter, as selection sees it.

    Attributes:
        keys: of the flat local elements.
        live: flat mask in force; elements that are 1 compete. None: all do.
        index: from flat positions to global indices.
        counted: the flat positions that this rank counts; each rank of a replica counts some.
        num_local: elements of this part ...
        numel: ... and of the whole parameter.
        device: of the keys.
        is_small: whether the part is visited together with others, by small.py.
    """

    keys: KeySource
    live: Tensor | None
    index: IndexMap
    counted: range
    num_local: int
    numel: int
    device: torch.device
    is_small: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        keys = self.keys
        self.__dict__["is_small"] = (
            0 < self.num_local <= MOST_ELEMENTS
            and isinstance(keys, ScoreKeys)
            and keys.scores.is_in_memory
            and memory.takes_numpy(self.device)
            and (self.live is None or self.live.itemsize in INTEGERS)
        )

    def counted_in(self, span: range) -> slice:
        """The elements of a span that this rank counts, from the beginning of the span."""
        first = min(max(span.start, self.counted.start), span.stop)
        last = max(min(span.stop, self.counted.stop), first)
        return slice(first - span.start, last - span.start)


def candidates_of(shards: Sequence[Shard], sources: Sequence[KeySource]) -> list[Candidates]:
    """What selection sees of this rank's shards: the elements that their masks leave compete."""
    return [
        Candidates(
            source,
            shard.flat_mask,
            shard.index,
            shard.counted,
            shard.values.numel(),
            shard.numel,
            shard.values.device,
        )
        for shard, source in zip(shards, sources, strict=True)
    ]


@dataclass(frozen=True)
class Ranked:
    """Parameters that are ranked together.

    Attributes:
        parts: this rank's part of every parameter, in the same order on all ranks.
        names: of the parameters, for messages.
        num_live: unpruned elements of every whole parameter.
        keys: the range of all keys.
        communicator: the ranks that have the parts.
        refuse_nan: whether a live NaN is an error; otherwise NaN rank last.
        most_collected: keys that all ranks together may collect in memory, about; None: any
            number.
    """

    parts: Sequence[Candidates]
    names: Sequence[str]
    num_live: Sequence[int]
    keys: KeyRange
    communicator: Communicator
    refuse_nan: bool = True
    most_collected: int | None = None

    def only(self, positions: Sequence[int], *, refuse_nan: bool) -> Ranked:
        """Some of the parameters."""
        return replace(
            self,
            parts=[self.parts[i] for i in positions],
            names=[self.names[i] for i in positions],
            num_live=[self.num_live[i] for i in positions],
            refuse_nan=refuse_nan,
        )


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
class Collected:
    """The live elements of one chunk whose keys lie in an interval.

    Attributes:
        span: flat positions of the chunk.
        positions: integers [m], from the beginning of the chunk.
        keys: [m].
        is_counted: whether this rank counts them.
        number: how many there are. On a device, ``positions`` and ``keys`` have a fixed length:
            they may have fewer, or have meaningless values at the end.
    """

    span: range
    positions: Tensor
    keys: Tensor
    is_counted: bool
    number: Count

    def first(self, number: int) -> Collected:
        """Without the meaningless values at the end, once the number has come from a device."""
        return replace(
            self, positions=self.positions[:number], keys=self.keys[:number], number=number
        )


@dataclass(frozen=True)
class ChunkScan:
    """What a scan of one chunk counted and collected.

    Attributes:
        counts: live keys <= each pivot.
        num_below: live keys below the interval; 0 without one.
        collected: the elements in the interval; None without one.
    """

    counts: list[Count]
    num_below: Count
    collected: Collected | None


def are_bool(out: Tensor, previous: Tensor | None) -> bool:
    """Whether a mask and the previous one are bool, so that a comparison can write it."""
    return out.dtype is torch.bool and (previous is None or previous.dtype is torch.bool)
