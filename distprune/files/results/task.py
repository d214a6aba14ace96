"""What a result consists of, whichever command makes it: files, and the units that fill them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from distprune.files.checkpoints.checkpoint import Checkpoint, SourceFile
from distprune.files.checkpoints.mask_files import MASK_FILE, MaskLayout
from distprune.files.disk.listing import OtherFile
from distprune.files.formats.header import TensorEntry
from distprune.files.ranking.units import CopyUnit, SpanUnit, Unit, copy_units
from distprune.files.results.placing import mask_mode

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
    """

    checkpoint: Checkpoint
    digest: str
    tensors: Sequence[TensorEntry]
    make_units: Callable[[], Sequence[SpanUnit]]
    layout: MaskLayout | None
    copied: Sequence[OtherFile]
    written_last: Sequence[str] = ()

    @cached_property
    def units(self) -> Sequence[Unit]:
        """All the work: every byte of the files, except the header of the masks."""
        rewritten = {entry.name for entry in self.tensors}
        return [*self.make_units(), *copy_units(self.checkpoint, rewritten, self.copied)]

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each file, by name."""
        files: list[SourceFile] = [*self.checkpoint.files, *self.copied]
        sizes = {file.name: file.size for file in files}
        if self.layout is not None:
            sizes[MASK_FILE] = self.layout.size
        return sizes

    @property
    def modes(self) -> dict[str, int]:
        """Permissions of each file, by name, before the umask."""
        files: list[SourceFile] = [*self.checkpoint.files, *self.copied]
        modes = {file.name: file.mode for file in files}
        if self.layout is not None:
            modes[MASK_FILE] = mask_mode(self.checkpoint.files)
        return modes

    @property
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
