"""Where the weights of a layer come from when it is run: files, other ranks, or memory.

    shares  keeps   a rank reads             a layer in memory comes from
    no      no      every layer, each time   the file
    yes     no      its rows, each time      the rows of all ranks (all-gather)
    yes     yes     its rows, once           the same, and the rows stay
    no      yes     every layer, once        a copy of what stays (one process)

The bytes of a layer are the same in all of them, and so is all that is computed from it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distprune._common.collectives import Communicator
from distprune._transformers.mask_matching import MaskSource
from distprune.language_models.loading import PartReader, read_rows


@dataclass(frozen=True)
class Holding:
    """How ranks come by the weights of a layer; the same on every rank.

    Attributes:
        shares: each rank reads a part of the rows, and gets the others from the other ranks.
        keeps: what a rank has read stays in its memory.
    """

    shares: bool = False
    keeps: bool = False


class Wanted(NamedTuple):
    """A tensor of a model, without memory, and what it is read from."""

    name: str
    empty: Tensor
    source: MaskSource


class WeightParts:
    """Gives the tensors of layers their values.

    Args:
        reader: of the checkpoint.
        device: where the values are wanted, and kept.
        holding: how they are come by.
        communicator: of the ranks.
    """

    def __init__(
        self,
        reader: PartReader,
        device: torch.device,
        holding: Holding,
        communicator: Communicator,
    ) -> None:
        self._reader = reader
        self._device = device
        self._holding = holding
        # Alone, a rank reads everything.
        self._communicator = communicator if holding.shares else Communicator(())
        self._kept: dict[str, Tensor] = {}

    def read(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        """The values of some tensors, in memory of their own. Collective if ranks share."""
        communicator = self._communicator
        parts = communicator.run(lambda: list(map(self._part, wanted)))
        if communicator.size == 1:
            return [part.clone() if self._holding.keeps else part for part in parts]
        values = []
        for number, (_, empty, _) in enumerate(wanted):
            part, parts[number] = parts[number], torch.empty(0)
            every = communicator.gather(part.reshape(-1).view(torch.uint8))
            rows = every.view(-1).view(part.dtype).view(-1, *part.shape[1:])
            values.append(rows[: empty.shape[0]] if empty.ndim else rows[0])
        return values

    def _part(self, wanted: Wanted) -> Tensor:
        """This rank's rows of a tensor, as many as every rank has; the last ones may be padding."""
        name, empty, source = wanted
        kept = self._kept.get(name)
        if kept is not None:
            return kept
        communicator = self._communicator
        size = -(-empty.shape[0] // communicator.size) if empty.ndim else 1
        part = torch.empty((size, *empty.shape[1:]), dtype=empty.dtype, device=self._device)
        if empty.ndim:
            first = min(communicator.index * size, empty.shape[0])
            rows = range(first, min(first + size, empty.shape[0]))
            read_rows(rows, source, part[: len(rows)], self._reader)
        else:
            read_rows(None, source, part[0], self._reader)
        if self._holding.keeps:
            self._kept[name] = part
        return part


def num_machines(num_ranks: int) -> int:
    """How many machines the ranks are on, as torchrun tells it; 1 if nothing does."""
    return max(1, num_ranks // int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)))
