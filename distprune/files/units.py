"""Work on a checkpoint, cut into units: what is either done or not when a stopped run continues.

Units depend on the task and on nothing else: not on the number of ranks, and not on what an earlier
run did. So any number of ranks can do the units that are left. A unit of pruning is a run of
elements of one group, in the order of ranking.

    tensors of group 0              |0 a.weight |1 b.weight       |2 c.weight    |
    units, cut when they are full   |0                |1               |2        |
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from distprune.files.checkpoints.checkpoint import Checkpoint, OtherFile, SourceFile
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.checkpoints.mask_files import MASK_FILE, MaskLayout, mask_layout
from distprune.files.planning import CARD_FILE, STATISTICS_FILE, Plan
from distprune.files.scoring import KeptValues

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


def prune_units(plan: Plan) -> list[SpanUnit]:
    """All selected elements, cut into units of about equal size, in the order of ranking.

    No unit has elements of two groups. There are at most 128 units, and one more for each group
    beyond the 64th.
    """
    num_units = max(_MAX_UNITS + 1 - len(plan.groups), _MIN_UNITS)
    size = max(_MIN_ELEMENTS, math.ceil(plan.num_elements / num_units))
    entries = [tensor.entry for tensor in plan.tensors]
    units: list[SpanUnit] = []
    for group in plan.groups:
        grains = [(position, _grain(plan, position)) for position in range(group.first, group.last)]
        units += span_units(entries, grains, size)
    return units


def span_units(
    entries: Sequence[TensorEntry], grains: Iterable[tuple[int, int]], size: int
) -> Iterator[SpanUnit]:
    """Cut tensors into units of ``size`` elements, or a few more; the last one may have fewer.

    Args:
        entries: of all tensors that are rewritten.
        grains: positions of those to cut, each with the number of elements that it is cut at
            multiples of: a multiple of 8, or the whole tensor.
        size: elements.
    """
    spans: list[Span] = []
    num_missing, num_bytes = size, 0
    for position, grain in grains:
        numel, first = entries[position].numel, 0
        while first < numel:
            last = min(first + math.ceil(num_missing / grain) * grain, numel)
            spans.append(Span(position, first, last))
            num_missing -= last - first
            num_bytes += (last - first) * (entries[position].nbytes // numel)
            first = last
            if num_missing <= 0:
                yield SpanUnit(tuple(spans), num_bytes)
                spans, num_missing, num_bytes = [], size, 0
    if spans:
        yield SpanUnit(tuple(spans), num_bytes)


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
    """Where a tensor may be cut: between whole groups, and whole bytes of its mask."""
    tensor = plan.tensors[position]
    if tensor.blocks is None:
        return 8
    grain = math.lcm(8, tensor.blocks.band)
    return min(grain, tensor.entry.numel) if grain > 8 else 8


def _copies(name: str, path: str, start: int, stop: int) -> list[CopyUnit]:
    return [
        CopyUnit(name, path, first, min(first + _COPY_BYTES, stop))
        for first in range(start, stop, _COPY_BYTES)
    ]


# By name of a file, the bytes [start, stop) of it, in the order in which they are written.
Ranges = dict[str, list[tuple[int, int]]]


@dataclass(frozen=True)
class Task:
    """A result to make.

    Attributes:
        checkpoint: the source.
        digest: of everything that decides the result.
        tensors: those that are rewritten; the positions of spans count these.
        make_units: cuts these tensors into units, which may depend on nothing but what the digest
            covers.
        layout: of the mask file; None: there is none.
        copied: files without weights that are copied.
        written_last: names of small files that are written when all units are done.
        values: of kept elements, in place of those of the source.
        replaces: whether it takes the place of a finished result at its destination.
        inputs: other files that it is made from; none may be in a result that is replaced.
    """

    checkpoint: Checkpoint
    digest: str
    tensors: Sequence[TensorEntry]
    make_units: Callable[[], Sequence[SpanUnit]]
    layout: MaskLayout | None
    copied: Sequence[OtherFile]
    written_last: Sequence[str] = ()
    values: KeptValues | None = None
    replaces: bool = False
    inputs: Sequence[str] = ()

    @cached_property
    def units(self) -> Sequence[Unit]:
        """All the work: every byte of the files, except the header of the masks."""
        rewritten = {entry.name for entry in self.tensors}
        return [*self.make_units(), *copy_units(self.checkpoint, rewritten, self.copied)]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size of each file, by name."""
        return {name: size for name, (size, _) in self.files.items()}

    @cached_property
    def files(self) -> dict[str, tuple[int, int]]:
        """Size of each file, and its permissions before the umask, by name."""
        sources: list[SourceFile] = [*self.checkpoint.files, *self.copied]
        files = {file.name: (file.size, file.mode) for file in sources}
        if self.layout is not None:  # those that all weight files have in common
            modes = (file.mode for file in self.checkpoint.files)
            mode = functools.reduce(operator.and_, modes, 0o666)
            files[MASK_FILE] = self.layout.size, mode
        return files

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all units, without the masks."""
        return sum(unit.num_bytes for unit in self.units)

    def ranges(self, unit: Unit) -> Ranges:
        """The bytes that a unit writes."""
        if isinstance(unit, CopyUnit):
            return {unit.name: [(unit.start, unit.stop)]}
        ranges: Ranges = {}
        for span in unit.spans:
            entry = self.tensors[span.position]
            width = entry.nbytes // entry.numel
            start, stop = (entry.start + index * width for index in (span.first, span.last))
            ranges.setdefault(entry.file, []).append((start, stop))
            if self.layout is not None:
                start = self.layout.starts[entry.name]
                piece = (start + span.first // 8, start + -(-span.last // 8))
                ranges.setdefault(MASK_FILE, []).append(piece)
        return ranges


def prune_task(plan: Plan, *, replaces: bool = False) -> Task:
    """The files of the result of a plan, and the units that fill them."""
    entries, inputs = [tensor.entry for tensor in plan.tensors], plan.inputs
    shapes = {entry.name: entry.shape for entry in entries}
    given = () if inputs.given is None else inputs.given.checkpoint.files
    written_last = [CARD_FILE] if plan.has_card else []
    written_last += [STATISTICS_FILE] if inputs.statistics is not None else []
    return Task(
        checkpoint=plan.checkpoint,
        digest=plan.digest,
        tensors=entries,
        make_units=lambda: prune_units(plan),
        layout=mask_layout(shapes, plan.checkpoint.files) if plan.recipe.masks else None,
        copied=plan.copied,
        written_last=written_last,
        values=inputs.values,
        replaces=replaces,
        inputs=[
            *(part.statistics for part in plan.recipe.parts if part.statistics is not None),
            *(file.path for file in given),
        ],
    )
