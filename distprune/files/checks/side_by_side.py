"""Source, result and masks, read side by side; what differs is counted, and not judged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from distprune._common.memory import Array
from distprune.files.checkpoints.mask_files import MASK_FILE, MaskFile, MaskLayout, read_keep
from distprune.files.checks.findings import Findings
from distprune.files.cuts import Cuts
from distprune.files.disk.access import OpenFiles, read_into
from distprune.files.lowest import LowestElements, Piece
from distprune.files.planning import Plan
from distprune.files.reading import Source
from distprune.files.units import CopyUnit, SpanUnit

_PIECE = 8 << 20  # bytes


class SideBySide:
    """Compares units of work.

    Args:
        plan: of the source.
        source: of the plan.
        cuts: of the groups that are ranked together.
        folder: the result; its files have their sizes.
        layout: of its masks.
        outputs: opens the result's files for reading.

    Attributes:
        findings: of the units that have been compared.
    """

    def __init__(
        self,
        plan: Plan,
        source: Source,
        cuts: Cuts,
        folder: Path,
        layout: MaskLayout,
        outputs: OpenFiles,
    ) -> None:
        self.findings = Findings(plan)
        self._plan = plan
        self._source = source
        self._folder = folder
        self._outputs = outputs
        shapes = {tensor.entry.name: tensor.entry.shape for tensor in plan.tensors}
        self._masks = MaskFile(str(folder / MASK_FILE), shapes, {}, layout.starts)
        self._lowest = LowestElements(plan, source, cuts)

    def compare_copied(self, unit: CopyUnit) -> Iterator[int]:
        """Read bytes that have to be equal; yields the bytes."""
        path = str(self._folder / unit.name)
        for start in range(unit.start, unit.stop, _PIECE):
            size = min(_PIECE, unit.stop - start)
            expected, result = (np.empty(size, dtype=np.uint8) for _ in range(2))
            read_into(self._source.files, unit.path, start, expected.data)
            read_into(self._outputs, path, start, result.data)
            different = np.flatnonzero(expected != result)
            if len(different):
                first = start + int(different[0])
                self.findings.add_difference(unit.name, len(different), first)
            self.findings.num_bytes += size
            yield size

    def compare_pruned(self, unit: SpanUnit) -> Iterator[int]:
        """Read elements of selected tensors, and their masks; yields the bytes of the source."""
        self._lowest.num_nan, self._lowest.thresholds = {}, {}
        for span in unit.spans:
            for piece in self._lowest.pieces(span):
                self._compare(span.position, piece)
                yield piece.bits.nbytes
            numel = self._plan.tensors[span.position].entry.numel
            if span.last == numel and span.last % 8:
                self.findings.add("tail", span.position, int(self._has_tail(span.position)))
        for position, count in self._lowest.num_nan.items():
            self.findings.add("nan", position, count)
        for position, key in self._lowest.thresholds.items():
            self.findings.add_threshold(position, key)

    def _compare(self, position: int, piece: Piece) -> None:
        """The mask is that of the recipe; the result is the source times the mask, with +0."""
        findings, entry = self.findings, self._plan.tensors[position].entry
        first, bits, lowest = piece
        keep = read_keep(self._masks, self._outputs, entry.name, first, first + len(bits))
        result: Array = np.empty_like(bits)
        start = entry.start + first * bits.itemsize
        read_into(self._outputs, str(self._folder / entry.file), start, result.data.cast("B"))
        findings.add_wrong("wrong", position, result != bits * keep, first)
        findings.add_wrong("misplaced", position, keep == lowest, first)
        findings.add("pruned", position, len(keep) - int(np.count_nonzero(keep)))
        findings.add("expected", position, int(np.count_nonzero(lowest)))
        findings.add("zero", position, len(bits) - int(np.count_nonzero(bits << 1)))
        findings.num_bytes += bits.nbytes

    def _has_tail(self, position: int) -> bool:
        """Whether bits are set after the last element of a mask."""
        entry = self._plan.tensors[position].entry
        last = np.empty(1, dtype=np.uint8)
        offset = self._masks.starts[entry.name] + entry.numel // 8
        read_into(self._outputs, self._masks.path, offset, last.data)
        return bool(last[0] >> entry.numel % 8)
