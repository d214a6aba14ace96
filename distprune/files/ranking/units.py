"""The work on a checkpoint in units: what is done, or not, when a run goes on after a stop.

Units depend on the plan and on nothing else, neither on the number of ranks nor on what was done
before, so that any ranks can do what is left. A unit of pruning is a run of elements of one group,
in the order of ranking, so a unit's ties come before those of the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distprune.files.planning import Plan
from distprune.files.ranking.groups import groups_of

# So few that a histogram for each fits into memory: 128 of 256 KiB, or 192 with as many groups as
# there may be.
_MAX_UNITS = 128
_MIN_UNITS = 64
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
    """Elements to prune; in the order of ranking.

    Attributes:
        spans: of one group. In a group with limits, either whole tensors, or a part of one.
        num_bytes: of them in a file.
        group: its number.
    """

    spans: tuple[Span, ...]
    num_bytes: int
    group: int


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
    """All selected elements, cut into units of about equal size, in the order of ranking.

    No unit has elements of two groups. There are at most 128 units, and one more for each group
    beyond the 64th.
    """
    num_units = max(_MAX_UNITS + 1 - len(plan.groups), _MIN_UNITS)
    wanted = max(_MIN_ELEMENTS, math.ceil(plan.num_elements / num_units))
    units: list[PruneUnit] = []
    for number, group in enumerate(plan.groups):
        positions = range(group.first, group.last)
        if group.has_limits:
            # Not cut wherever a unit is full: twice the size, for as many units at most.
            runs = _whole_tensors(plan, positions, 2 * wanted)
        else:
            runs = _full_units(plan, positions, wanted)
        units += [_unit(plan, spans, number) for spans in runs]
    return units


def _full_units(plan: Plan, positions: range, wanted: int) -> Iterator[list[Span]]:
    spans: list[Span] = []
    missing = wanted
    for position in positions:
        numel, grain = plan.tensors[position].entry.numel, _grain(plan, position)
        first = 0
        while first < numel:
            size = min(numel - first, math.ceil(missing / grain) * grain)
            spans.append(Span(position, first, first + size))
            first += size
            missing -= size
            if missing <= 0:
                yield spans
                spans, missing = [], wanted
    if spans:
        yield spans


def _whole_tensors(plan: Plan, positions: range, wanted: int) -> Iterator[list[Span]]:
    """Runs of whole tensors, and of large ones parts: what a limit holds is counted at one place.

    At most 2 n / wanted + 1 of them for n elements: a tensor that is cut has at least 1.5
    ``wanted``, becomes at most 4/3 as many parts, and ends one run before it is full.
    """
    spans: list[Span] = []
    num_elements = 0
    for position in positions:
        numel = plan.tensors[position].entry.numel
        num_parts = (2 * numel + wanted) // (2 * wanted)  # rounded, halves up
        if num_parts > 1:
            if spans:
                yield spans
            size = math.ceil(numel / num_parts / 8) * 8
            for first in range(0, numel, size):
                yield [Span(position, first, min(first + size, numel))]
            spans, num_elements = [], 0
            continue
        spans.append(Span(position, 0, numel))
        num_elements += numel
        if num_elements >= wanted:
            yield spans
            spans, num_elements = [], 0
    if spans:
        yield spans


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


def _grain(plan: Plan, position: int) -> int:
    """Where a tensor may be cut: whole groups, and whole bytes of its mask."""
    tensor = plan.tensors[position]
    if tensor.num_groups == 0:
        return 8
    block = groups_of(tensor, plan.recipe_of(position)).block
    return min(math.lcm(block, 8), tensor.entry.numel)


def _unit(plan: Plan, spans: list[Span], group: int) -> PruneUnit:
    num_bytes = 0
    for span in spans:
        entry = plan.tensors[span.position].entry
        num_bytes += (span.last - span.first) * (entry.nbytes // entry.numel)
    return PruneUnit(tuple(spans), num_bytes, group)


def _copies(name: str, path: str, start: int, stop: int) -> list[CopyUnit]:
    return [
        CopyUnit(name, path, first, min(first + _COPY_BYTES, stop))
        for first in range(start, stop, _COPY_BYTES)
    ]
