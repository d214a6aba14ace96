"""A result of ``prune`` beside what it has to be: bytes, masks and zeros, piece by piece."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from distprune._common.memory import Array
from distprune.files.checkpoints.mask_files import MASK_FILE, MaskFile, MaskLayout, read_keep
from distprune.files.disk.access import OpenFiles, read_into
from distprune.files.planning import Plan
from distprune.files.rewriting import Piece
from distprune.files.text import printable
from distprune.files.units import CopyUnit, Span

_PIECE = 8 << 20  # bytes


class Comparison:
    """Compares a result with what ``prune`` writes; its method ``add`` is a ``rewriting.Sink``.

    Args:
        folder: the result.
        plan: derived from the source.
        layout: of the masks.

    Attributes:
        masks: of the result.
        outputs: opens the result's files for reading.
        num_bytes: how many bytes of the source were compared.
        num_pruned: how many elements are pruned, according to the masks.
        found: by (what is wrong, tensor or file): how often, and the first element or byte.
    """

    def __init__(self, folder: Path, plan: Plan, layout: MaskLayout) -> None:
        self.outputs = OpenFiles(os.O_RDONLY)
        self.num_bytes = self.num_pruned = 0
        self.found: dict[tuple[str, str], tuple[int, int]] = {}
        self._folder = folder
        self._entries = [tensor.entry for tensor in plan.tensors]
        values = plan.inputs.values
        self._updated = frozenset[str]() if values is None else values.names
        shapes = {entry.name: entry.shape for entry in self._entries}
        self.masks = MaskFile(str(folder / MASK_FILE), shapes, {}, layout.starts)

    def add(self, span: Span, piece: Piece) -> Array | None:
        """The mask is that of the recipe; the result is the source times the mask, with +0.

        No bits are set after the last element of a mask.
        """
        entry, (first, bits, keep) = self._entries[span.position], piece
        kept = read_keep(self.masks, self.outputs, entry.name, first, first + len(bits))
        written: Array = np.empty_like(bits)
        start = entry.start + first * bits.itemsize
        read_into(self.outputs, str(self._folder / entry.file), start, written.data.cast("B"))
        is_updated = entry.name in self._updated  # the report has a checksum of what was kept
        if is_updated:
            bits = written
        self._note("wrong", entry.name, written != bits * kept, first)
        self._note("misplaced", entry.name, kept != keep, first)
        self.num_pruned += len(kept) - int(np.count_nonzero(kept))
        self.num_bytes += bits.nbytes
        last = first + len(bits)
        if last == entry.numel and last % 8:
            tail = read_keep(self.masks, self.outputs, entry.name, last, -(-last // 8) * 8)
            self._note("tail", entry.name, tail, last)
        return written if is_updated else None

    def compare_copy(self, sources: OpenFiles, unit: CopyUnit) -> Iterator[int]:
        """Read bytes that have to be equal; yields numbers of bytes."""
        path = str(self._folder / unit.name)
        for start in range(unit.start, unit.stop, _PIECE):
            size = min(_PIECE, unit.stop - start)
            expected, written = (np.empty(size, dtype=np.uint8) for _ in range(2))
            read_into(sources, unit.path, start, expected.data)
            read_into(self.outputs, path, start, written.data)
            self._note("copy", unit.name, written != expected, start)
            self.num_bytes += size
            yield size

    def _note(self, what: str, where: str, are_wrong: Array, first: int) -> None:
        places = np.flatnonzero(are_wrong)
        if len(places):
            self._add((what, where), len(places), first + int(places[0]))

    def _add(self, key: tuple[str, str], count: int, first: int) -> None:
        num_before, first_before = self.found.get(key, (0, first))
        self.found[key] = num_before + count, min(first, first_before)

    def state(self) -> list[Any]:
        """All that was found, as JSON, for :meth:`merge`."""
        return [self.num_bytes, self.num_pruned, [[*key, *n] for key, n in self.found.items()]]

    def merge(self, state: list[Any]) -> None:
        """Add what another rank has found."""
        num_bytes, num_pruned, found = state
        self.num_bytes += num_bytes
        self.num_pruned += num_pruned
        for what, where, count, first in found:
            self._add((what, where), count, first)

    def problems(self) -> list[str]:
        """What is wrong with bytes, by file and tensor."""
        names = [entry.name for entry in self._entries]
        keys = sorted(key for key in self.found if key[0] == "copy")
        keys += [(what, name) for name in names for what in ("wrong", "tail", "misplaced")]
        return [
            f"{printable(key[1])}: {_described(key[0], *self.found[key])}"
            for key in keys
            if key in self.found
        ]


def _described(what: str, count: int, first: int) -> str:
    if what == "copy":
        more = f"; so do {count - 1} more" if count > 1 else ""
        return f"byte {first} differs from the source, and belongs to no pruned tensor{more}."
    if what == "tail":
        return "the last byte of its mask has bits that belong to no element."
    problem = "are pruned or kept against the order of scores"
    if what == "wrong":
        problem = "are neither kept as they were nor pruned as the mask says"
    return f"{count} elements {problem}; the first is number {first}."
