"""Masks that exist, on another checkpoint: a copy of it with zeros where they are zero."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distprune.files.checkpoint import Checkpoint, open_checkpoint
from distprune.files.destination import resolve_destination
from distprune.files.disk import (
    OpenFiles,
    allocate,
    copy_range,
    read_into,
    sync_folder,
    write_from,
    writing,
)
from distprune.files.errors import CheckpointError, Interrupted, counted
from distprune.files.header import TensorEntry, WeightFile
from distprune.files.masks import (
    MASK_FILE,
    MaskFile,
    MaskWriter,
    mask_layout,
    open_masks,
    read_keep,
)
from distprune.files.partial import Lock, check_free, check_place, check_unchanged
from distprune.files.permissions import make_folders, mask_mode
from distprune.files.scanning import FORMATS

_CHUNK = 1 << 20  # elements; a multiple of 8


@dataclass(frozen=True)
class Applied:
    """What :func:`apply_masks` did.

    Attributes:
        num_elements: of the tensors that have a mask.
        num_pruned: by the masks.
        num_zeroed: of these, how many were not zero before.
        num_tensors: that have a mask.
    """

    num_elements: int
    num_pruned: int
    num_zeroed: int
    num_tensors: int


class Application:
    """Masks and the checkpoint that they are for, checked; nothing is written yet.

    Args:
        masks: a folder that ``distprune prune`` or ``save_masks`` wrote.
        source: the checkpoint.
        follow_links: copy what lies behind links that leave the source, too.

    Raises:
        CheckpointError: either is malformed, or they do not fit; all problems.
    """

    def __init__(
        self, masks: str | Path, source: str | Path, *, follow_links: bool = False
    ) -> None:
        self._masks: MaskFile = open_masks(masks)
        self.checkpoint: Checkpoint = open_checkpoint(source, follow_links=follow_links)
        entries = {entry.name: entry for entry in self.checkpoint.tensors}
        problems = []
        for name, shape in self._masks.shapes.items():
            entry = entries.get(name)
            if entry is None:
                problems.append(f"the checkpoint has no tensor {name}.")
            elif entry.shape != shape:
                problems.append(
                    f"tensor {name} is {list(entry.shape)}, but its mask {list(shape)}."
                )
            elif entry.dtype not in FORMATS:
                problems.append(f"tensor {name} is {entry.dtype}; expected a plain float.")
        if problems:
            shown = problems[:12]
            if len(problems) > len(shown):
                shown.append(f"{len(problems) - len(shown)} more do not fit.")
            what = counted(f"{masks} on {source}", problems)
            raise CheckpointError(what, shown)
        self._entries = [entries[name] for name in self._masks.shapes]

    def write(
        self,
        destination: str | Path,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Applied:
        """Write the copy. It appears by one rename at the end, or not at all.

        Args:
            destination: a name that is free.
            on_bytes: is told how many bytes have been written.
            stop: asked after every few megabytes.

        Raises:
            CheckpointError: the source cannot be read, or has changed.
            OutputError: the destination is taken, or the disk full.
            Interrupted: ``stop`` said so. What was written is removed; the next run begins anew.

        Cost: one read, one write; some 50 MB of memory.
        """
        target = resolve_destination(destination)
        check_place(self.checkpoint.place, target)
        lock = Lock(target)
        lock.acquire()
        folder = target.with_name(f"{target.name}.partial-apply")
        try:
            check_free(target)
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
            with writing(folder):
                make_folders(self.checkpoint.folders, folder)
                (folder / MASK_FILE).parent.mkdir(exist_ok=True)
            applied = self._fill(folder, on_bytes, stop)
            check_unchanged(self)  # type: ignore[arg-type]  # asks for the checkpoint alone
            with writing(target):
                for each, _, _ in os.walk(folder):
                    sync_folder(each)
                check_free(target)
                folder.rename(target)
                sync_folder(target.parent)
            return applied
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()

    def _fill(
        self, folder: Path, on_bytes: Callable[[int], None], stop: Callable[[], bool]
    ) -> Applied:
        sources, outputs = OpenFiles(os.O_RDONLY), OpenFiles(os.O_RDWR)
        writer = _Writer(self._masks, sources, outputs, folder)
        try:
            layout = mask_layout(self._entries, self.checkpoint.files)
            writer.make(MASK_FILE, layout.size, mask_mode(self.checkpoint.files))
            write_from(outputs, str(folder / MASK_FILE), 0, layout.header)
            for file in self.checkpoint.files:
                writer.make(file.name, file.size, file.mode)
                for num_bytes in writer.weights(file, layout.starts):
                    on_bytes(num_bytes)
                    _check(stop)
            for other in self.checkpoint.others:
                output = writer.make(other.name, other.size, other.mode)
                for num_bytes in copy_range(sources, other.path, outputs, output, 0, other.size):
                    on_bytes(num_bytes)
                    _check(stop)
            outputs.sync()
        finally:
            sources.close()
            outputs.close()
        numel = sum(entry.numel for entry in self._entries)
        return Applied(numel, writer.num_pruned, writer.num_zeroed, len(self._entries))


class _Writer:
    """Writes the files of a copy; counts what becomes zero."""

    def __init__(
        self, masks: MaskFile, sources: OpenFiles, outputs: OpenFiles, folder: Path
    ) -> None:
        self._masks = masks
        self._sources = sources
        self._outputs = outputs
        self._folder = folder
        self.num_pruned = 0
        self.num_zeroed = 0

    def make(self, name: str, size: int, mode: int) -> str:
        """Make an empty file of a size, with the permissions of its source; its path."""
        path = str(self._folder / name)
        allocate(path, size, mode)
        return path

    def weights(self, file: WeightFile, mask_starts: dict[str, int]) -> Iterator[int]:
        """Write a file of weights, and the masks of its tensors; yields bytes."""
        output = str(self._folder / file.name)
        start = 0
        for entry in file.tensors:
            if entry.name in mask_starts:
                yield from copy_range(
                    self._sources, file.path, self._outputs, output, start, entry.start
                )
                yield from self._tensor(entry, file.path, output, mask_starts[entry.name])
                start = entry.stop
        yield from copy_range(self._sources, file.path, self._outputs, output, start, file.size)

    def _tensor(self, entry: TensorEntry, path: str, output: str, start: int) -> Iterator[int]:
        form = FORMATS[entry.dtype]
        mask_writer = MaskWriter(self._outputs, str(self._folder / MASK_FILE), start)
        for first in range(0, entry.numel, _CHUNK):
            last = min(first + _CHUNK, entry.numel)
            raw = np.empty((last - first) * form.width, np.uint8)
            offset = entry.start + first * form.width
            read_into(self._sources, path, offset, memoryview(raw))
            drop = ~read_keep(self._masks, self._sources, entry.name, first, last)
            self.num_pruned += int(np.count_nonzero(drop))
            self.num_zeroed += int(np.count_nonzero(form.magnitudes(raw)[drop]))
            raw.view(form.bits)[drop] = 0
            write_from(self._outputs, output, offset, memoryview(raw))
            mask_writer.add(~drop)
            yield raw.nbytes
        mask_writer.finish()


def _check(stop: Callable[[], bool]) -> None:
    if stop():
        raise Interrupted("stopped as asked; nothing is left of it.")
