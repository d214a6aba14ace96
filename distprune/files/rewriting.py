"""Tensors with zeros in their pruned elements: how ``prune`` and ``apply`` write them.

    pieces of a tensor, and what is pruned of them --> rewritten --> sink --> weights, masks
                                                           |
                                                           +--> counts for the report

``verify`` runs the same loop, with a sink that compares.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distprune._common import mask_bits
from distprune._common.float_formats import PLAIN_FLOATS
from distprune._common.memory import Array
from distprune.files.checkpoints.header import TensorEntry, read_header
from distprune.files.checkpoints.mask_files import (
    MASK_FILE,
    MaskFile,
    read_keep,
)
from distprune.files.disk.access import OutputFiles, read_into
from distprune.files.errors import CheckpointError
from distprune.files.scoring import KeptValues
from distprune.files.units import Span, SpanUnit, Task

_CHUNK = 1 << 20  # elements of a piece
# By what is counted for the report, by position of a tensor.
Counts = defaultdict[str, Counter[int]]


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


# The elements of a span in their order, and which of them are kept; adds to the counts.
Pieces = Callable[[Span, Counts], Iterator[Piece]]
# Takes the pieces of a span, one after the other, and may overwrite their bits. Returns what stands
# in the place of a piece, if values of kept elements are not those of the source.
Sink = Callable[[Span, Piece], Array | None]


def rewritten(unit: SpanUnit, pieces: Pieces, sink: Sink, record: dict[str, Any]) -> Iterator[int]:
    """Pass the pieces of a unit to a sink; yields bytes.

    Args:
        record: at the end it gets counts, by position of a tensor: how many elements were pruned,
            how many were zero in the source, and those of the pieces; and a checksum of what stands
            where values of kept elements are not those of the source.
    """
    counts: Counts = defaultdict(Counter)
    for span in unit.spans:
        counts["pruned"][span.position] += 0
        for piece in pieces(span, counts):
            num_bytes = piece.bits.nbytes
            counts["pruned"][span.position] += len(piece.keep) - int(np.count_nonzero(piece.keep))
            num_zero = len(piece.bits) - int(np.count_nonzero(piece.bits << 1))
            if num_zero:
                counts["zero"][span.position] += num_zero
            values = sink(span, piece)
            if values is not None:
                record["values"] = zlib.crc32(values.data.cast("B"), record.get("values", 0))
            yield num_bytes
    record |= counts


def masked_pieces(entries: Sequence[TensorEntry], masks: MaskFile) -> Pieces:
    """What existing masks keep of the tensors of a checkpoint.

    Args:
        entries: the tensors; the positions of spans count them.
        masks: one for each tensor.
    """

    def pieces(span: Span, counts: Counts) -> Iterator[Piece]:
        entry = entries[span.position]
        form = PLAIN_FLOATS[entry.dtype]
        for first in range(span.first, span.last, _CHUNK):
            last = min(first + _CHUNK, span.last)
            raw = np.empty((last - first) * form.num_bytes, np.uint8)
            offset = entry.start + first * form.num_bytes
            read_into(entry.path, offset, raw.data)
            keep = read_keep(masks, entry.name, first, last)
            is_zeroed = ~keep & (form.magnitudes(raw) != 0)
            counts["zeroed"][span.position] += int(np.count_nonzero(is_zeroed))
            yield Piece(first, raw.view(form.bits), keep)

    return pieces


def _entries_of(values: KeptValues, entries: Collection[TensorEntry]) -> dict[str, TensorEntry]:
    """By name of a tensor, the place of its kept values.

    Raises:
        CheckpointError: a tensor is missing, or has another dtype or shape than in the source.
    """
    assert values.folder is not None
    files = [read_header(path) for path in sorted(values.folder.glob("*.safetensors"))]
    found = {entry.name: entry for file in files for entry in file.tensors}
    for entry in entries:
        if entry.name in values.names:
            own = found.get(entry.name)
            if own is None or (own.dtype, own.shape) != (entry.dtype, entry.shape):
                has = "is missing" if own is None else f"is {own.dtype} {list(own.shape)}"
                raise CheckpointError(
                    f"{entry.name} {has} in {values.folder}; expected {entry.dtype} "
                    f"{list(entry.shape)}, as in the source."
                )
    return {name: own for name, own in found.items() if name in values.names}


class FileSink:
    """Writes weights and masks into the files of a folder, which exist and have their sizes.

    Args:
        task: that makes them.
        folder: the unfinished result.
    """

    def __init__(self, task: Task, folder: Path) -> None:
        self._values = {} if task.values is None else _entries_of(task.values, task.tensors)
        self.outputs = OutputFiles()
        self._task = task
        self._folder = folder
        self._rest = np.empty(0, dtype=bool)  # of a mask, less than a byte

    def add(self, span: Span, piece: Piece) -> Array | None:
        """Write a piece and its mask; see :data:`Sink`."""
        entry, (first, bits, keep) = self._task.tensors[span.position], piece
        if is_new := entry.name in self._values:
            own = self._values[entry.name]
            start = own.start + first * bits.itemsize
            read_into(own.path, start, bits.data.cast("B"))
        np.multiply(bits, keep, out=bits)  # pruned bits are 0, so +0 whatever the sign was
        start = entry.start + first * bits.itemsize
        self.outputs.write(str(self._folder / entry.file), start, bits.data)
        if self._task.layout is not None:
            num_whole = len(self._rest) + len(keep)
            if first + len(keep) < span.last:
                num_whole -= num_whole % 8
            start = self._task.layout.starts[entry.name] + (first - len(self._rest)) // 8
            keep = np.concatenate([self._rest, keep]) if len(self._rest) else keep
            self._rest = keep[num_whole:].copy()
            if num_whole:
                packed = mask_bits.pack(keep[:num_whole])
                self.outputs.write(str(self._folder / MASK_FILE), start, packed.data)
        return bits if is_new else None
