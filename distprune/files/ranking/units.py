"""Work on a checkpoint, cut into units: what is either done or not when a stopped run continues.

Units depend on the task and on nothing else: not on the number of ranks, and not on what an earlier
run did. So any number of ranks can do the units that are left. A unit of pruning is a run of
elements of one group, in the order of ranking.

    tensors of group 0              |0 a.weight |1 b.weight       |2 c.weight    |
    units, cut when they are full   |0                |1               |2        |
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.files.disk.listing import OtherFile
from distprune.files.formats.header import TensorEntry
from distprune.files.planning import Plan
from distprune.files.ranking.groups import bands_of, groups_of

# So few that a histogram for each fits into memory: 128 of 256 KiB, or 192 with as many groups as
# there may be.
_MAX_UNITS = 128
_MIN_UNITS = 64
_MIN_ELEMENTS = 1 << 23
_COPY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [first, last) of a tensor that is rewritten.

    Attributes:
        position: of the tensor among those that are rewritten.
        first: a multiple of 8, so masks of different spans share no byte.
        last: the element after the last one.
    """

    position: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class SpanUnit:
    """Elements to rewrite.

    Attributes:
        spans: in the order in which they are rewritten.
        num_bytes: of the elements in the file.
    """

    spans: tuple[Span, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PruneUnit(SpanUnit):
    """Elements of one group to prune, in the order of ranking.

    Attributes:
        group: number of the group.
    """

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


Unit = SpanUnit | CopyUnit


def prune_units(plan: Plan) -> list[PruneUnit]:
    """All selected elements, cut into units of about equal size, in the order of ranking.

    No unit has elements of two groups. There are at most 128 units, and one more for each group
    beyond the 64th.
    """
    num_units = max(_MAX_UNITS + 1 - len(plan.groups), _MIN_UNITS)
    size = max(_MIN_ELEMENTS, math.ceil(plan.num_elements / num_units))
    entries = [tensor.entry for tensor in plan.tensors]
    units: list[PruneUnit] = []
    for number, group in enumerate(plan.groups):
        positions = range(group.first, group.last)
        runs = full_runs(((p, entries[p].numel, _grain(plan, p)) for p in positions), size)
        units += [PruneUnit(tuple(spans), span_bytes(spans, entries), number) for spans in runs]
    return units


def full_runs(tensors: Iterable[tuple[int, int, int]], size: int) -> Iterator[list[Span]]:
    """Cut tensors into runs of ``size`` elements, or a few more; the last run may have fewer.

    Args:
        tensors: position, number of elements and grain of each tensor. A tensor is cut at multiples
            of its grain, which is itself a multiple of 8 or the whole tensor.
        size: elements.
    """
    spans: list[Span] = []
    num_missing = size
    for position, numel, grain in tensors:
        first = 0
        while first < numel:
            last = min(first + math.ceil(num_missing / grain) * grain, numel)
            spans.append(Span(position, first, last))
            num_missing -= last - first
            first = last
            if num_missing <= 0:
                yield spans
                spans, num_missing = [], size
    if spans:
        yield spans


def span_bytes(spans: Iterable[Span], entries: Sequence[TensorEntry]) -> int:
    """Bytes of spans in the files of their tensors."""
    num_bytes = 0
    for span in spans:
        entry = entries[span.position]
        num_bytes += (span.last - span.first) * (entry.nbytes // entry.numel)
    return num_bytes


def copy_units(
    checkpoint: Checkpoint, rewritten: Collection[str], copied: Iterable[OtherFile]
) -> list[CopyUnit]:
    """All bytes that stay: headers, tensors that are not rewritten, other files.

    Args:
        checkpoint: the source.
        rewritten: names of the other tensors.
        copied: files without weights.
    """
    units = []
    for file in checkpoint.files:
        start = 0
        for entry in file.tensors:
            if entry.name in rewritten:
                units += _copies(file.name, file.path, start, entry.start)
                start = entry.stop
        units += _copies(file.name, file.path, start, file.size)
    for other in copied:
        units += _copies(other.name, other.path, 0, other.size)
    return units


def units_by_rank(units: Sequence[tuple[int, Unit]], num_ranks: int) -> list[list[int]]:
    """Split numbered units evenly by bytes: a run of them for each rank, so that reads go forward.

    Returns:
        Per rank, the numbers of its units.
    """
    total = sum(unit.num_bytes for _, unit in units)
    numbers: list[list[int]] = [[] for _ in range(num_ranks)]
    num_done = 0
    for number, unit in units:
        middle = num_done + unit.num_bytes / 2
        rank = min(int(middle * num_ranks / total), num_ranks - 1) if total else 0
        numbers[rank].append(number)
        num_done += unit.num_bytes
    return numbers


def _grain(plan: Plan, position: int) -> int:
    """Where a tensor may be cut: between whole groups or tiles, and whole bytes of its mask."""
    tensor, recipe = plan.tensors[position], plan.recipe_of(position)
    bands = bands_of(tensor, recipe)
    grain = 8 if bands is None else math.lcm(bands.size, 8)
    if tensor.num_groups:
        block = groups_of(tensor, recipe).block * recipe.group_rule.tile_size
        grain = math.lcm(grain, block)
    return min(grain, tensor.entry.numel) if grain > 8 else 8


def _copies(name: str, path: str, start: int, stop: int) -> list[CopyUnit]:
    return [
        CopyUnit(name, path, first, min(first + _COPY_BYTES, stop))
        for first in range(start, stop, _COPY_BYTES)
    ]
