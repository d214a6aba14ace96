"""Tensors with zeros in their pruned elements: how ``prune`` and ``apply`` write them.

    pieces of a tensor, and what is pruned of them --> rewritten --> sink --> weights, masks
                                                           |
                                                           +--> counts for the report

``verify`` runs the same loop, with a sink that compares.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from distprune._common.float_formats import PLAIN_FLOATS
from distprune._common.memory import Array
from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.files.checkpoints.header import TensorEntry, read_header
from distprune.files.checkpoints.mask_files import (
    MASK_FILE,
    MaskFile,
    MaskLayout,
    MaskWriter,
    read_keep,
)
from distprune.files.disk.access import WRITE, OpenFiles, read_into, write_from
from distprune.files.errors import CheckpointError
from distprune.files.kept_values import KeptValues
from distprune.files.units import Span, SpanUnit

_CHUNK = 1 << 20  # elements of a piece; a multiple of 8
Counts = dict[str, dict[int, int]]  # by what is counted, by position of a tensor


class Piece(NamedTuple):
    """Consecutive elements of a tensor.

    Attributes:
        first: index of the first one.
        bits: as they are stored.
        keep: bool, which of them are kept; valid until the next piece.
    """

    first: int
    bits: Array
    keep: Array


class Pieces(Protocol):
    """Says which elements of a span are kept."""

    def pieces(self, span: Span) -> Iterator[Piece]:
        """The elements of a span, in their order."""
        ...

    def take_counts(self) -> Counts:
        """What was counted in the pieces since the last call, for the report."""
        ...


class Sink(Protocol):
    """Takes the pieces of a span, one after the other."""

    def add(self, span: Span, piece: Piece) -> Array | None:
        """Take a piece; may overwrite its bits.

        Returns:
            What stands in its place, if values of kept elements are not those of the source.
        """
        ...

    def finish(self, span: Span) -> None:
        """Note that all pieces of a span were added."""
        ...


def rewritten(unit: SpanUnit, pieces: Pieces, sink: Sink, record: dict[str, Any]) -> Iterator[int]:
    """Pass the pieces of a unit to a sink; yields bytes.

    Args:
        record: at the end it gets counts, by position of a tensor: how many elements were pruned,
            how many were zero in the source, and those of the pieces; and a checksum of what stands
            where values of kept elements are not those of the source.
    """
    pieces.take_counts()
    pruned: Counter[int] = Counter()
    zero: Counter[int] = Counter()
    for span in unit.spans:
        pruned[span.position] += 0
        for piece in pieces.pieces(span):
            num_bytes = piece.bits.nbytes
            pruned[span.position] += len(piece.keep) - int(np.count_nonzero(piece.keep))
            num_zero = len(piece.bits) - int(np.count_nonzero(piece.bits << 1))
            if num_zero:
                zero[span.position] += num_zero
            values = sink.add(span, piece)
            if values is not None:
                record["values"] = zlib.crc32(values.data.cast("B"), record.get("values", 0))
            yield num_bytes
        sink.finish(span)
    counts = {"pruned": dict(pruned), "zero": dict(zero), **pieces.take_counts()}
    record |= {what: of_tensors for what, of_tensors in counts.items() if of_tensors}


class MaskedElements:
    """What existing masks prune of the tensors of a checkpoint; see :class:`Pieces`.

    Args:
        checkpoint: has the tensors.
        entries: these tensors; the positions of spans count them.
        files: opens the files of the checkpoint and of the masks.
        masks: one for each tensor.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        entries: Sequence[TensorEntry],
        files: OpenFiles,
        masks: MaskFile,
    ) -> None:
        self._entries = entries
        self._masks = masks
        self._files = files
        self._paths = {file.name: file.path for file in checkpoint.files}
        self._num_zeroed: dict[int, int] = {}

    def pieces(self, span: Span) -> Iterator[Piece]:
        """The elements of a span, with what their mask prunes."""
        position, entry = span.position, self._entries[span.position]
        form = PLAIN_FLOATS[entry.dtype]
        for first in range(span.first, span.last, _CHUNK):
            last = min(first + _CHUNK, span.last)
            raw = np.empty((last - first) * form.num_bytes, np.uint8)
            offset = entry.start + first * form.num_bytes
            read_into(self._files, self._paths[entry.file], offset, raw.data)
            keep = read_keep(self._masks, self._files, entry.name, first, last)
            num_zeroed = int(np.count_nonzero(~keep & (form.magnitudes(raw) != 0)))
            self._num_zeroed[position] = self._num_zeroed.get(position, 0) + num_zeroed
            yield Piece(first, raw.view(form.bits), keep)

    def take_counts(self) -> Counts:
        """How many pruned elements were not zero before."""
        counts, self._num_zeroed = {"zeroed": self._num_zeroed}, {}
        return counts


class ValueReader:
    """Reads kept values piece by piece.

    Raises:
        CheckpointError: a tensor is missing, or has another dtype or shape than in the source.
    """

    def __init__(self, values: KeptValues, entries: Collection[TensorEntry]) -> None:
        assert values.folder is not None
        paths = sorted(values.folder.glob("*.safetensors"))
        files = [read_header(str(path), path.name) for path in paths]
        found = {entry.name: entry for file in files for entry in file.tensors}
        self._entries: dict[str, TensorEntry] = {}
        for entry in entries:
            if entry.name not in values.names:
                continue
            own = found.get(entry.name)
            if own is None or (own.dtype, own.shape) != (entry.dtype, entry.shape):
                has = "is missing" if own is None else f"is {own.dtype} {list(own.shape)}"
                raise CheckpointError(
                    f"{entry.name} {has} in {values.folder}; expected {entry.dtype} "
                    f"{list(entry.shape)}, as in the source."
                )
            self._entries[entry.name] = own
        self._paths = {path.name: str(path) for path in paths}
        self._files = OpenFiles(os.O_RDONLY)

    def read(self, name: str, first: int, bits: Array) -> bool:
        """Replace the bits of a tensor's elements, from ``first`` on; False: it has no values."""
        entry = self._entries.get(name)
        if entry is None:
            return False
        start = entry.start + first * bits.itemsize
        read_into(self._files, self._paths[entry.file], start, bits.data.cast("B"))
        return True

    def close(self) -> None:
        """Close the files."""
        self._files.close()


class FileSink:
    """Writes weights and masks into the files of a folder, which exist and have their sizes.

    Args:
        folder: the unfinished result.
        entries: the rewritten tensors; the positions of spans count these.
        layout: the layout of the mask file; None: no masks are written.
        values: of kept elements; None: they are those of the source.
    """

    def __init__(
        self,
        folder: Path,
        entries: Sequence[TensorEntry],
        layout: MaskLayout | None,
        values: KeptValues | None = None,
    ) -> None:
        self._values = None if values is None else ValueReader(values, entries)
        self.outputs = OpenFiles(WRITE)
        self._folder = folder
        self._entries = entries
        self._layout = layout
        self._masks: MaskWriter | None = None

    def add(self, span: Span, piece: Piece) -> Array | None:
        entry, bits = self._entries[span.position], piece.bits
        is_new = self._values is not None and self._values.read(entry.name, piece.first, bits)
        np.multiply(bits, piece.keep, out=bits)  # pruned bits are 0, so +0 whatever the sign was
        start = entry.start + piece.first * bits.itemsize
        write_from(self.outputs, str(self._folder / entry.file), start, bits.data)
        if self._layout is not None:
            if self._masks is None:
                start = self._layout.starts[entry.name] + span.first // 8
                self._masks = MaskWriter(self.outputs, str(self._folder / MASK_FILE), start)
            self._masks.add(piece.keep)
        return bits if is_new else None

    def finish(self, span: Span) -> None:
        if self._masks is not None:
            self._masks.finish()
            self._masks = None

    def close(self) -> None:
        """Close all files."""
        self.outputs.close()
        if self._values is not None:
            self._values.close()
