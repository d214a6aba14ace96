"""Tensors of one checkpoint, written again with zeros where the masks of another one are zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distprune._common.float_formats import PLAIN_FLOATS
from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.files.checkpoints.mask_files import (
    MASK_FILE,
    MaskFile,
    MaskLayout,
    MaskWriter,
    read_keep,
)
from distprune.files.disk.access import WRITE
from distprune.files.disk.open_files import OpenFiles, read_into, write_from
from distprune.files.formats.header import TensorEntry
from distprune.files.ranking.units import Span, SpanUnit, full_runs, span_bytes

_CHUNK = 1 << 20  # elements; a multiple of 8
_UNIT_ELEMENTS = 1 << 23


def mask_units(entries: Sequence[TensorEntry]) -> list[SpanUnit]:
    """All elements of some tensors, cut into units of about equal size."""
    tensors = ((position, entry.numel, 8) for position, entry in enumerate(entries))
    return [
        SpanUnit(tuple(spans), span_bytes(spans, entries))
        for spans in full_runs(tensors, _UNIT_ELEMENTS)
    ]


class Masker:
    """Applies masks to units, one after the other; see ``resuming.Worker``.

    Args:
        checkpoint: the source.
        entries: its tensors that have a mask; the positions of spans count these.
        masks: of these tensors.
        sources: opens files for reading.
        folder: where to write; its files exist and have their sizes.
        layout: of the mask file in the folder.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        entries: Sequence[TensorEntry],
        masks: MaskFile,
        sources: OpenFiles,
        folder: Path,
        layout: MaskLayout,
    ) -> None:
        self.outputs = OpenFiles(WRITE)
        self._entries = entries
        self._masks = masks
        self._sources = sources
        self._folder = folder
        self._layout = layout
        self._paths = {file.name: file.path for file in checkpoint.files}
        self._record: dict[str, dict[int, int]] = {}

    def rewrite(self, number: int, unit: SpanUnit) -> Iterator[int]:
        """Do a unit; yields bytes. Then :meth:`record` returns its counts."""
        self._record = {"pruned": {}, "zeroed": {}}
        for span in unit.spans:
            yield from self._apply(span)

    def record(self) -> dict[str, Any]:
        """Counts of the last unit, by position of a tensor.

        How many elements the masks prune, and how many of these were not zero before.
        """
        return {what: counts for what, counts in self._record.items() if counts}

    def _apply(self, span: Span) -> Iterator[int]:
        entry = self._entries[span.position]
        float_format = PLAIN_FLOATS[entry.dtype]
        start = self._layout.starts[entry.name] + span.first // 8
        writer = MaskWriter(self.outputs, str(self._folder / MASK_FILE), start)
        num_pruned = num_zeroed = 0
        for first in range(span.first, span.last, _CHUNK):
            last = min(first + _CHUNK, span.last)
            raw = np.empty((last - first) * float_format.num_bytes, np.uint8)
            offset = entry.start + first * float_format.num_bytes
            read_into(self._sources, self._paths[entry.file], offset, raw.data)
            keep = read_keep(self._masks, self._sources, entry.name, first, last)
            pruned = ~keep
            num_pruned += int(np.count_nonzero(pruned))
            num_zeroed += int(np.count_nonzero(float_format.magnitudes(raw)[pruned]))
            raw.view(float_format.bits)[pruned] = 0
            write_from(self.outputs, str(self._folder / entry.file), offset, raw.data)
            writer.add(keep)
            yield raw.nbytes
        writer.finish()
        self._record["pruned"][span.position] = num_pruned
        self._record["zeroed"][span.position] = num_zeroed
