"""``verify``: compare a pruned checkpoint with its source, byte by byte.

Nothing is taken from the run that made it but the masks, the recipe and the threshold, and these
are checked: what the recipe selects, how much it prunes and in which order is derived anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distprune.files.disk import OpenFiles, read_into
from distprune.files.errors import CheckpointError
from distprune.files.groups import groups_of
from distprune.files.header import read_header
from distprune.files.masks import MaskFile, open_masks, read_keep
from distprune.files.model_card import card_problem
from distprune.files.planning import Plan, plan
from distprune.files.recipe import FileRecipe
from distprune.files.report import Report, read_report
from distprune.files.scores import Array
from distprune.files.streaming import CHUNK, MAX_IN_MEMORY, Source
from distprune.files.units import CopyUnit, Span, copy_units

_PIECE = 8 << 20


@dataclass(frozen=True)
class VerifyReport:
    """What a comparison found.

    Attributes:
        problems: all that is wrong; empty if the result is what the recipe asks for.
        num_bytes: that were compared.
        num_elements: of the selected tensors.
        num_pruned: of them, according to the masks.
    """

    problems: tuple[str, ...]
    num_bytes: int
    num_elements: int
    num_pruned: int

    @property
    def is_good(self) -> bool:
        return not self.problems


def verify(destination: str | Path, source: str | Path) -> VerifyReport:
    """Check a pruned checkpoint against its source.

    Every byte outside of the pruned elements is that of the source, and every pruned element +0;
    the masks prune exactly as many elements as the recipe says, in all or in each group; and no
    pruned element comes after a kept one in the order, ties included. Files that only the
    destination has are not looked at.

    Args:
        destination: a folder that :func:`prune` wrote, with masks.
        source: the checkpoint that it was made from.

    Raises:
        CheckpointError: a folder cannot be read, has no masks, or another source.
        SelectionError: the recipe does not fit the source.

    Cost: one read of both (layers of more than 4 million elements twice), in one process; memory
    as for pruning.
    """
    report = read_report(destination)
    recipe = FileRecipe(**report.recipe)
    masks = open_masks(destination)
    checking = _Checking(Path(destination), plan(source, recipe), report, masks)
    return checking.run()


class _Checking:
    """One comparison."""

    def __init__(self, folder: Path, plan: Plan, report: Report, masks: MaskFile) -> None:
        self._folder = folder
        self._plan = plan
        self._report = report
        self._masks = masks
        self._source = Source(plan)
        self._files = OpenFiles(os.O_RDONLY)
        self._problems: list[str] = []
        self._num_bytes = 0

    def run(self) -> VerifyReport:
        try:
            self._check_headers()
            for unit in copy_units(self._plan):
                self._check_copy(unit)
            self._check_card()
            num_pruned = self._check_tensors()
        finally:
            self._source.close()
            self._files.close()
        return VerifyReport(
            tuple(self._problems), self._num_bytes, self._plan.num_elements, num_pruned
        )

    def _check_headers(self) -> None:
        """That source and destination belong together; the rest would make no sense otherwise."""
        crcs = {file.name: file.header_crc for file in self._plan.checkpoint.files}
        if self._masks.header_crcs != crcs:
            raise CheckpointError(
                f"{self._folder} was not made from {self._plan.checkpoint.folder}: the headers of "
                "its weight files were others."
            )
        for file in self._plan.checkpoint.files:
            found = read_header(self._folder / file.name, file.name)
            if (found.header_crc, found.size) != (file.header_crc, file.size):
                raise CheckpointError(f"{self._folder / file.name} has another header or size.")
        selected = {tensor.entry.name: tensor.entry.shape for tensor in self._plan.tensors}
        if self._masks.shapes != selected:
            raise CheckpointError(
                f"the masks in {self._folder} are not those of the tensors that its recipe selects."
            )

    def _check_copy(self, unit: CopyUnit) -> None:
        path = str(self._folder / unit.name)
        for start in range(unit.start, unit.stop, _PIECE):
            size = min(_PIECE, unit.stop - start)
            pair = [np.empty(size, dtype=np.uint8) for _ in range(2)]
            read_into(self._source.files, unit.path, start, memoryview(pair[0]))
            try:
                read_into(self._files, path, start, memoryview(pair[1]))
            except CheckpointError as error:
                self._problems.append(error.headline)
                return
            self._num_bytes += size
            different = np.flatnonzero(pair[0] != pair[1])
            if len(different):
                self._problems.append(
                    f"{unit.name}: byte {start + int(different[0])} differs from the source, and "
                    "belongs to no pruned tensor."
                )
                return

    def _check_card(self) -> None:
        """README.md, which is none of the source's bytes, is what the recipe and the counts say."""
        problem = card_problem(self._folder, self._plan, self._report)
        if problem:
            self._problems.append(problem)

    def _check_tensors(self) -> int:
        """Values, counts and order of the selected tensors; how many elements are pruned."""
        bits = self._report.threshold_bits
        together = None if bits is None else _Order(int(bits, 16))
        total = 0
        for position, tensor in enumerate(self._plan.tensors):
            if tensor.num_groups == 0:
                whole = Span(position, 0, tensor.entry.numel)
                num_pruned = self._check_run(whole, together)
            else:
                num_pruned = self._check_groups(position)
            total += num_pruned
        if total != self._plan.num_to_prune:
            self._problems.append(
                f"{total} elements are pruned in all; the recipe asks for "
                f"{self._plan.num_to_prune}."
            )
        return total

    def _check_run(self, span: Span, order: _Order | None) -> int:
        """Elements that are ranked with others, or are one group too large to hold."""
        num_pruned, is_ordered = 0, True
        for keys, keep in self._pieces(span, CHUNK):
            num_pruned += int(np.count_nonzero(~keep))
            is_ordered = is_ordered and (order is None or order.holds(keys, keep))
        if not is_ordered:
            self._complain_of_order(span.position)
        return num_pruned

    def _check_groups(self, position: int) -> int:
        tensor = self._plan.tensors[position]
        groups = groups_of(tensor, self._plan.recipe)
        whole = Span(position, 0, tensor.entry.numel)
        num_pruned, num_wrong = 0, 0
        if groups.size > MAX_IN_MEMORY:
            for first in range(0, whole.last, groups.size):
                span = Span(position, first, first + groups.size)
                count = self._check_run(span, _Order(self._largest_pruned(span)))
                num_wrong += count != groups.num_pruned
                num_pruned += count
        else:
            is_ordered = True
            step = max(CHUNK // groups.block, 1) * groups.block
            for keys, keep in self._pieces(whole, step):
                different = groups.lowest(keys) == keep
                num_pruned += int(np.count_nonzero(~keep))
                is_ordered = is_ordered and not different.any()
            if not is_ordered:
                self._complain_of_order(position)
        wanted = tensor.num_groups * groups.num_pruned
        if num_wrong or num_pruned != wanted:
            self._problems.append(
                f"{tensor.entry.name}: {num_pruned} elements are pruned; the recipe asks for "
                f"{groups.num_pruned} in each of {tensor.num_groups} groups."
            )
        return num_pruned

    def _largest_pruned(self, span: Span) -> int:
        largest, first = 0, span.first
        name = self._plan.tensors[span.position].entry.name
        chunks = self._source.chunks_of_keys(span.position, span.first, span.last, own=True)
        for keys, _ in chunks:
            keep = read_keep(self._masks, self._files, name, first, first + len(keys))
            largest = max(largest, int(keys[~keep].max(initial=0)))
            first += len(keys)
        return largest

    def _pieces(self, span: Span, step: int) -> Iterator[tuple[Array, Array]]:
        """Keys and masks of elements, in order; compares the values on the way."""
        tensor = self._plan.tensors[span.position]
        entry, own = tensor.entry, tensor.num_groups > 0
        path, size = str(self._folder / entry.file), self._source.itemsize(span.position)
        num_wrong, first_wrong = 0, 0
        for first in range(span.first, span.last, step):
            last = min(first + step, span.last)
            bits = self._source.bits(span.position, first, last)
            found = np.empty_like(bits)
            read_into(self._files, path, entry.start + first * size, memoryview(found).cast("B"))
            keep = read_keep(self._masks, self._files, entry.name, first, last)
            wrong = np.flatnonzero(found != bits * keep)
            if len(wrong) and not num_wrong:
                first_wrong = first + int(wrong[0])
            num_wrong += len(wrong)
            self._num_bytes += bits.nbytes
            yield self._source.keys(span.position, first, bits, last - first, own), keep
        if num_wrong:
            self._problems.append(
                f"{entry.name}: {num_wrong} elements are neither kept as they were nor pruned as "
                f"the mask says; the first is number {first_wrong}."
            )

    def _complain_of_order(self, position: int) -> None:
        name = self._plan.tensors[position].entry.name
        self._problems.append(
            f"{name}: an element is pruned that comes after a kept one in the order of scores."
        )


class _Order:
    """Checks that elements, shown in their order, are cut at a threshold."""

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._has_kept_tie = False

    def holds(self, keys: Array, keep: Array) -> bool:
        """False if one of these goes or stays against the order."""
        threshold = keys.dtype.type(self._threshold)
        if np.any(keep & (keys < threshold)) or np.any(~keep & (keys > threshold)):
            return False
        kept_ties = keep[keys == threshold]
        is_cut_once = not np.any(kept_ties[:-1] & ~kept_ties[1:])
        if self._has_kept_tie and not kept_ties.all():
            return False
        self._has_kept_tie |= bool(kept_ties.any())
        return is_cut_once
