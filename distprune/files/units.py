"""The work on a checkpoint in units: what is done, or not, when a run goes on after a stop.

Units depend on the plan and on nothing else, neither on the number of ranks nor on what was done
before, so that any ranks can do what is left. A unit of pruning is a run of elements in the order
of ranking, so a unit's ties come before those of the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distprune.files.groups import groups_of
from distprune.files.planning import Plan, PlannedTensor
from distprune.files.recipe import FileRecipe

# So few that a histogram for each fits into memory: 128 of 256 KiB.
_MAX_UNITS = 128
_MIN_ELEMENTS = 1 << 23
_COPY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [first, last) of a selected tensor; ``first`` is a multiple of 8."""

    position: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class PruneUnit:
    """Elements to prune; in the order of ranking."""

    spans: tuple[Span, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CopyUnit:
    """Bytes [start, stop) of a file that stay as they are."""

    name: str
    path: str
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


Unit = PruneUnit | CopyUnit


def prune_units(plan: Plan) -> list[PruneUnit]:
    """All selected elements, cut into units of about equal size, in the order of ranking."""
    wanted = max(_MIN_ELEMENTS, math.ceil(plan.num_elements / _MAX_UNITS))
    units: list[PruneUnit] = []
    spans: list[Span] = []
    missing = wanted
    for position, tensor in enumerate(plan.tensors):
        numel, grain = tensor.entry.numel, _grain(tensor, plan.recipe)
        first = 0
        while first < numel:
            size = min(numel - first, math.ceil(missing / grain) * grain)
            spans.append(Span(position, first, first + size))
            first += size
            missing -= size
            if missing <= 0:
                units.append(_unit(plan, spans))
                spans, missing = [], wanted
    if spans:
        units.append(_unit(plan, spans))
    return units


def copy_units(plan: Plan) -> list[CopyUnit]:
    """All bytes that stay: headers, tensors that are not selected, other files."""
    pruned = {tensor.entry.name for tensor in plan.tensors}
    units = []
    for file in plan.checkpoint.files:
        start = 0
        for entry in file.tensors:
            if entry.name in pruned:
                units += _copies(file.name, file.path, start, entry.start)
                start = entry.stop
        units += _copies(file.name, file.path, start, file.size)
    for other in plan.copied:
        units += _copies(other.name, other.path, 0, other.size)
    return units


def share_out(units: Sequence[tuple[int, Unit]], num_ranks: int) -> list[list[int]]:
    """Split numbered units evenly by bytes: a run of them for each rank, so that reads go forward.

    Returns:
        Per rank, the numbers of its units.
    """
    total = sum(unit.num_bytes for _, unit in units)
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    done = 0
    for number, unit in units:
        middle = done + unit.num_bytes / 2
        rank = min(int(middle * num_ranks / total), num_ranks - 1) if total else 0
        shares[rank].append(number)
        done += unit.num_bytes
    return shares


def _grain(tensor: PlannedTensor, recipe: FileRecipe) -> int:
    """Where a tensor may be cut: whole groups, and whole bytes of its mask."""
    if tensor.num_groups == 0:
        return 8
    return min(math.lcm(groups_of(tensor, recipe).block, 8), tensor.entry.numel)


def _unit(plan: Plan, spans: list[Span]) -> PruneUnit:
    num_bytes = 0
    for span in spans:
        entry = plan.tensors[span.position].entry
        num_bytes += (span.last - span.first) * (entry.nbytes // entry.numel)
    return PruneUnit(tuple(spans), num_bytes)


def _copies(name: str, path: str, start: int, stop: int) -> list[CopyUnit]:
    return [
        CopyUnit(name, path, first, min(first + _COPY_BYTES, stop))
        for first in range(start, stop, _COPY_BYTES)
    ]
