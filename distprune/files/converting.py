"""Pickled checkpoints (``pytorch_model.bin``, ``*.pt``) as safetensors: ``distprune convert``.

 file of torch.save --unpickle--> tensors in the file --copied to--> safetensors file
 other files --copied--> the same names

[Note: tied weights] Names that are one tensor in a pickle are written each, with the same bytes.
Which of them a model makes of which other is known to its class alone; a model that joins them
finds equal values and joins them, and one that does not misses none.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distprune.files.checkpoints.checkpoint import why_left_out
from distprune.files.checkpoints.pickled_names import (
    SUFFIXES,
    find_pickles,
    index_output,
    locate_pickles,
    output_name,
)
from distprune.files.disk.access import sync_folder, write_atomically, writing
from distprune.files.disk.allocation import allocate
from distprune.files.disk.destination import resolve_destination
from distprune.files.disk.listing import (
    ascii_name,
    list_files,
    list_one,
    outside_problem,
    unreadable,
)
from distprune.files.disk.locking import Lock
from distprune.files.disk.open_files import OpenFiles, copy_range, write_from
from distprune.files.disk.space import check_free_bytes
from distprune.files.errors import CheckpointError, Interrupted, OutputError, headline
from distprune.files.formats.header import load_json, read_header
from distprune.files.formats.unpickling import DTYPES, Unpickled, unpickle
from distprune.files.results.permissions import make_folders
from distprune.files.results.placing import check_free, check_place, check_unchanged

_PIECE = 16 << 20  # bytes


@dataclass(frozen=True)
class Converted:
    """What :meth:`Conversion.write` did.

    Attributes:
        files: by name of a pickled file, the name of its safetensors file.
        num_tensors, num_bytes: of all tensors.
        tied: groups of names that were one tensor, and were written each.
        notes: sentences on what else the pickled files hold.
        copied: other files.
        not_copied: (name, reason).
    """

    files: dict[str, str]
    num_tensors: int
    num_bytes: int
    tied: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    copied: tuple[str, ...]
    not_copied: dict[str, str]


@dataclass
class _Written:
    """What has been written so far."""

    weight_map: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    tied: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Conversion:
    """A pickled checkpoint, known by its files; none of them is loaded yet.

    Args:
        source: a folder, a pickled file, or a model of the local hub cache.
        follow_links: copy what lies behind links that leave the source, too.

    Attributes:
        folder: where it was found.
        skipped: (name, reason) of files that are not copied.
        total_bytes: to write, about.

    Raises:
        CheckpointError: there are no pickled weights, or safetensors already; a file is missing
            or cannot be read; with all problems.
    """

    def __init__(self, source: str | Path, *, follow_links: bool = False) -> None:
        place = locate_pickles(source)
        self.folder = place.folder
        self._place = os.path.join(self.folder, place.file or "") if place.is_alone else self.folder
        if place.is_alone and place.file is not None:
            listing = list_one(self.folder, place.file, follow_links=follow_links)
        else:
            listing = list_files(
                self.folder, why_left_out, suffixes=SUFFIXES, follow_links=follow_links
            )
        problems = listing.problems
        if listing.outside:
            problems.append(outside_problem(listing.outside))
        self._files = listing.files
        self._folders = sorted(listing.folders.items())
        self._index: str | None = None
        self._map: dict[str, str] = {}
        self._shards: list[str] = []
        if not problems:
            self._index, self._map, self._shards = find_pickles(
                self.folder, place, self._files, problems
            )
        self._outputs = {name: output_name(name) for name in self._shards}
        self._index_output = index_output(self._index, self._outputs)
        converted = {*self._shards, self._index}
        self._others = [file for name, file in self._files.items() if name not in converted]
        taken = {other.name for other in self._others} & {
            *self._outputs.values(), self._index_output
        }  # fmt: skip
        problems += [f"{name} is there already, beside its pickled form." for name in sorted(taken)]
        problems += unreadable([*map(self._files.__getitem__, self._shards), *self._others])
        if problems:
            raise CheckpointError(headline(ascii_name(self.folder), problems), problems)
        self.skipped = tuple(sorted(listing.skipped))
        self.note = place.note
        self.total_bytes = sum(file.size for file in self._files.values())

    def write(
        self,
        destination: str | Path,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Converted:
        """Write the checkpoint as safetensors. It appears by one rename at the end, or not at all.

        Names, dtypes, shapes and bits of all tensors are those of the pickles; sharding stays as
        it is, with a new index; all other files are copied.

        Args:
            destination: a name that is free.
            on_bytes: is told how many bytes have been written.
            stop: asked after every few megabytes.

        Raises:
            CheckpointError: a file asks for code to be run, or holds no plain tensors; the index
                does not fit; the source has changed.
            OutputError: the destination is taken, or the disk full.
            Interrupted: ``stop`` said so. What was written is removed.

        Cost: one read, one write. The pages of one pickled file are mapped at a time; a file of
        torch before 1.6 is held in memory.
        """
        target = resolve_destination(destination)
        check_place(self._place, target)
        lock = Lock(target)
        try:
            lock.acquire()
            written = self._write_locked(target, on_bytes, stop)
        finally:
            lock.release()
        return Converted(
            files=self._outputs,
            num_tensors=len(written.weight_map),
            num_bytes=written.num_bytes,
            tied=tuple(written.tied),
            notes=tuple(written.notes),
            copied=tuple(other.name for other in self._others),
            not_copied=dict(self.skipped),
        )

    def _write_locked(
        self, target: Path, on_bytes: Callable[[int], None], stop: Callable[[], bool]
    ) -> _Written:
        folder = target.with_name(f"{target.name}.partial-convert")
        try:
            check_free(target)
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
            with writing(folder):
                make_folders(self._folders, folder)
            check_free_bytes(folder, self.total_bytes, target)
            written = self._fill(folder, on_bytes, stop)
            check_unchanged(self.folder, self._files.values())
            with writing(target):
                for each, _, _ in os.walk(folder):
                    sync_folder(each)
                check_free(target)
                folder.rename(target)
                sync_folder(target.parent)
            return written
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _fill(
        self, folder: Path, on_bytes: Callable[[int], None], stop: Callable[[], bool]
    ) -> _Written:
        sources, outputs = OpenFiles(os.O_RDONLY), OpenFiles(os.O_RDWR)
        written = _Written()
        try:
            for steps in self._steps(folder, sources, outputs, written):
                on_bytes(steps)
                if stop():
                    raise Interrupted("stopped as asked; nothing is left of it.")
            outputs.sync()
        finally:
            sources.close()
            outputs.close()
        if self._index_output is not None:
            self._write_index(folder / self._index_output, written)
        return written

    def _steps(
        self, folder: Path, sources: OpenFiles, outputs: OpenFiles, written: _Written
    ) -> Iterator[int]:
        for name in self._shards:
            file, output = self._files[name], self._outputs[name]
            found = unpickle(file.path, name)
            self._check_shard(name, found, written)
            written.weight_map |= dict.fromkeys(found.tensors, output)
            written.notes += found.notes
            written.tied += found.tied
            written.num_bytes += sum(tensor.nbytes for tensor in found.tensors.values())
            yield from write_tensors(str(folder / output), found.tensors, file.mode, outputs)
            names = {entry.name for entry in read_header(folder / output).tensors}
            if names != set(found.tensors):
                raise OutputError(f"{folder / output} was changed while it was written.")
        for other in self._others:
            path = str(folder / other.name)
            allocate(path, other.size, other.mode)
            yield from copy_range(sources, other.path, outputs, path, 0, other.size)

    def _check_shard(self, name: str, found: Unpickled, written: _Written) -> None:
        """That a file holds what the index says, and nothing twice."""
        lost = [key for key, file in self._map.items() if file == name and key not in found.tensors]
        problems = [f"{name} lacks {key}, which {self._index} lists." for key in lost[:8]]
        twice = [key for key in found.tensors if key in written.weight_map]
        problems += [f"{key} is in {name} and in a file before it." for key in twice[:8]]
        if not found.tensors:
            problems.append(f"{name} holds no tensor.")
        if problems:
            raise CheckpointError(headline(ascii_name(self.folder), problems), problems)

    def _write_index(self, path: Path, written: _Written) -> None:
        index = load_json(Path(self._files[self._index or ""].path).read_bytes(), str(self._index))
        metadata = index.get("metadata")
        metadata = dict(metadata) if isinstance(metadata, dict) else {}
        metadata["total_size"] = written.num_bytes
        weight_map = dict(sorted(written.weight_map.items()))
        text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n"
        write_atomically(path, text.encode())


def write_tensors(
    path: str, tensors: Mapping[str, Tensor], mode: int, outputs: OpenFiles
) -> Iterator[int]:
    """Write a safetensors file, in the order of the tensors; yields bytes.

    The bytes are those that the safetensors library writes, with {"format": "pt"}.

    Args:
        path: of a new file.
        tensors: dense, of dtypes in ``DTYPES``.
        mode: permissions of the file, less the umask.
        outputs: opened for writing.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    offset = 8 + len(raw)
    allocate(path, offset + end, mode)
    write_from(outputs, path, 0, len(raw).to_bytes(8, "little") + raw)
    for tensor in tensors.values():
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().data
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            write_from(outputs, path, offset + start, piece)
            yield len(piece)
        offset += len(data)
