"""Selected tensors, written again with zeros in the pruned elements, and their masks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from distprune.files.checkpoints.mask_files import MASK_FILE, MaskLayout, MaskWriter
from distprune.files.disk.access import WRITE
from distprune.files.disk.open_files import OpenFiles, write_from
from distprune.files.planning import Plan
from distprune.files.ranking.cuts import Cuts
from distprune.files.ranking.lowest import LowestElements, Piece
from distprune.files.ranking.source import Source
from distprune.files.ranking.units import Span, SpanUnit


class Rewriter:
    """Prunes units, one after the other; see ``resuming.Worker``.

    Args:
        plan: what to do.
        source: of the plan.
        folder: where to write; its files exist and have their sizes.
        layout: of the mask file; None: no masks.
        cuts: of the groups that are ranked together.
    """

    def __init__(
        self, plan: Plan, source: Source, folder: Path, layout: MaskLayout | None, cuts: Cuts
    ) -> None:
        self.outputs = OpenFiles(WRITE)
        self._plan = plan
        self._source = source
        self._folder = folder
        self._layout = layout
        self._lowest = LowestElements(plan, source, cuts)
        self._record: dict[str, dict[int, int]] = {}

    def rewrite(self, number: int, unit: SpanUnit) -> Iterator[int]:
        """Do a unit; yields bytes. Then :meth:`record` returns its counts."""
        self._lowest.num_nan, self._lowest.thresholds = {}, {}
        self._record = {
            "pruned": {},
            "nan": self._lowest.num_nan,
            "zero": {},
            "threshold": self._lowest.thresholds,
        }
        for span in unit.spans:
            masks = self._mask_writer(span)
            for piece in self._lowest.pieces(span):
                num_bytes = piece.bits.nbytes
                self._write(span, piece, masks)
                yield num_bytes
            if masks is not None:
                masks.finish()

    def record(self) -> dict[str, Any]:
        """Counts of the last unit, by position of a tensor.

        How many elements were pruned; how many are NaN, of tensors that are ranked on their own;
        how many were zero in the source; and the largest key that was pruned, of tensors with a
        threshold of their own.
        """
        return {what: counts for what, counts in self._record.items() if counts}

    def _write(self, span: Span, piece: Piece, masks: MaskWriter | None) -> None:
        """Write a piece without its lowest elements; overwrites its bits."""
        entry, bits, keep = self._plan.tensors[span.position].entry, piece.bits, ~piece.lowest
        self._count("zero", span.position, len(bits) - int(np.count_nonzero(bits << 1)))
        np.multiply(bits, keep, out=bits)  # pruned bits are 0, so +0 whatever the sign was
        start = entry.start + piece.first * bits.itemsize
        write_from(self.outputs, str(self._folder / entry.file), start, bits.data)
        if masks is not None:
            masks.add(keep)
        self._record["pruned"].setdefault(span.position, 0)
        self._count("pruned", span.position, int(np.count_nonzero(piece.lowest)))

    def _count(self, what: str, position: int, count: int) -> None:
        if count:
            counts = self._record[what]
            counts[position] = counts.get(position, 0) + count

    def _mask_writer(self, span: Span) -> MaskWriter | None:
        if self._layout is None:
            return None
        start = self._layout.starts[self._plan.tensors[span.position].entry.name]
        path = str(self._folder / MASK_FILE)
        return MaskWriter(self.outputs, path, start + span.first // 8)
