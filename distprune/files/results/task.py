"""What a result consists of, whatever makes it: files, and the units that fill them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from distprune.files.checkpoints.checkpoint import Checkpoint, OtherFile
from distprune.files.checkpoints.mask_files import MASK_FILE, MaskLayout
from distprune.files.formats.header import TensorEntry
from distprune.files.ranking.units import CopyUnit, Unit
from distprune.files.results.permissions import mask_mode

# By name of a file, the bytes [start, stop) of it, in the order in which they are written.
Ranges = dict[str, list[tuple[int, int]]]


@dataclass(frozen=True)
class Task:
    """A result in the making.

    Attributes:
        checkpoint: the source.
        digest: of all that decides the result.
        tensors: that are rewritten; a span's position counts these.
        make_units: cuts all the work into units; they depend on the digest alone, and together
            they fill every byte of the files, but for the header of the masks.
        layout: of the mask file; None: there is none.
        copied: files without weights that are copied.
        written_last: names of small files that are written when all units are done.
    """

    checkpoint: Checkpoint
    digest: str
    tensors: Sequence[TensorEntry]
    make_units: Callable[[], Sequence[Unit]]
    layout: MaskLayout | None
    copied: Sequence[OtherFile]
    written_last: Sequence[str] = ()

    @cached_property
    def units(self) -> Sequence[Unit]:
        """All the work."""
        return self.make_units()

    @property
    def sizes(self) -> dict[str, int]:
        """By name of a file, its size."""
        files = (*self.checkpoint.files, *self.copied)
        sizes = {file.name: file.size for file in files}
        if self.layout is not None:
            sizes[MASK_FILE] = self.layout.size
        return sizes

    @property
    def modes(self) -> dict[str, int]:
        """By name of a file, its permissions, before the umask."""
        files = (*self.checkpoint.files, *self.copied)
        modes = {file.name: file.mode for file in files}
        if self.layout is not None:
            modes[MASK_FILE] = mask_mode(self.checkpoint.files)
        return modes

    @property
    def num_bytes(self) -> int:
        """Of all units, masks aside."""
        return sum(unit.num_bytes for unit in self.units)

    def ranges(self, unit: Unit) -> Ranges:
        """What a unit writes."""
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
