"""Pickled checkpoints (``pytorch_model.bin``, ``*.pt``) as safetensors: ``distprune convert``.

 file of torch.save --unpickle--> tensors in the file --copied to--> safetensors file
 other files --copied--> the same names

[Note: tied weights] If names share one tensor in a pickle, each of them is written, with the same
bytes. Only the model's class knows which of them it ties. A model that ties them finds equal
values; any other model finds all of its weights.
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
    list_files,
    list_one,
    outside_problem,
    unreadable,
)
from distprune.files.disk.locking import Lock
from distprune.files.disk.open_files import OpenFiles, copy_range, write_from
from distprune.files.disk.space import check_free_bytes
from distprune.files.errors import CheckpointError, Interrupted, OutputError, headline
from distprune.files.formats.header import read_header
from distprune.files.formats.strict_json import load_json
from distprune.files.formats.unpickling import DTYPES, Unpickled, unpickle
from distprune.files.results.permissions import make_folders
from distprune.files.results.placing import check_free, check_place, check_unchanged
from distprune.files.text import printable

_PIECE = 16 << 20  # bytes


@dataclass(frozen=True)
class Converted:
    """The result of :meth:`Conversion.write`.

    Attributes:
        files: by name of a pickled file, the name of its safetensors file.
        num_tensors, num_bytes: of all tensors.
        tied: groups of names that shared one tensor.
        notes: sentences on other content of the pickled files.
        copied: names of other files.
        not_copied: by name of a file, the reason.
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
    """The tensors written so far."""

    weight_map: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    tied: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Conversion:
    """A pickled checkpoint to be converted; its files are listed and not yet loaded.

    Args:
        source: a folder, a pickled file, or a model in the local hub cache.
        follow_links: also copy the targets of links that leave the source.

    Attributes:
        folder: of the checkpoint.
        skipped: (name, reason) of files that are not copied.
        note: a sentence for the user on how the checkpoint was found; may be empty.
        total_bytes: to write, approximately.

    Raises:
        CheckpointError: there are no pickled weights, or safetensors files already; a file is
            missing or cannot be read; with all problems.
    """

    def __init__(self, source: str | Path, *, follow_links: bool = False) -> None:
        location = locate_pickles(source)
        self.folder = self._root = location.folder
        if location.is_alone and location.file is not None:
            self._root = os.path.join(self.folder, location.file)
            listing = list_one(self.folder, location.file, follow_links=follow_links)
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
            self._index, self._map, self._shards = find_pickles(location, self._files, problems)
        self._outputs = {name: output_name(name) for name in self._shards}
        self._index_output = index_output(self._index)
        converted = {*self._shards, self._index}
        self._others = [file for name, file in self._files.items() if name not in converted]
        taken = {other.name for other in self._others} & {
            *self._outputs.values(), self._index_output
        }  # fmt: skip
        problems += [f"{name} exists already, beside its pickled form." for name in sorted(taken)]
        problems += unreadable([*map(self._files.__getitem__, self._shards), *self._others])
        if problems:
            raise CheckpointError(headline(printable(self.folder), problems), problems)
        self.skipped = tuple(sorted(listing.skipped))
        self.note = location.note
        self.total_bytes = sum(file.size for file in self._files.values())

    def write(
        self,
        destination: str | Path,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Converted:
        """Write the checkpoint as safetensors; one rename at the end makes it visible.

        Names, dtypes, shapes and bits of all tensors, and their distribution over files, are those
        of the pickles. The index is new; all other files are copied.

        Args:
            destination: must not exist.
            on_bytes: called with numbers of bytes that were written.
            stop: called after every few megabytes; if it returns True, the conversion stops.

        Raises:
            CheckpointError: loading a file would run code, a file holds values that are not plain
                tensors, the index does not fit, or the source has changed.
            OutputError: the destination exists, or the disk is full.
            Interrupted: ``stop`` returned True. The written files are removed.

        Cost: one read, one write. One pickled file is mapped at a time; a file of torch before 1.6
        is loaded into memory.
        """
        target = resolve_destination(destination)
        check_place(self._root, target)
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
                for path, _, _ in os.walk(folder):
                    sync_folder(path)
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
                    raise Interrupted("stopped as asked; nothing was kept.")
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
            unpickled = unpickle(file.path, name)
            self._check_shard(name, unpickled, written)
            written.weight_map |= dict.fromkeys(unpickled.tensors, output)
            written.notes += unpickled.notes
            written.tied += unpickled.tied
            written.num_bytes += sum(tensor.nbytes for tensor in unpickled.tensors.values())
            yield from write_tensors(str(folder / output), unpickled.tensors, file.mode, outputs)
            names = {entry.name for entry in read_header(folder / output).tensors}
            if names != set(unpickled.tensors):
                raise OutputError(f"{folder / output} was changed while it was written.")
        for other in self._others:
            path = str(folder / other.name)
            allocate(path, other.size, other.mode)
            yield from copy_range(sources, other.path, outputs, path, 0, other.size)

    def _check_shard(self, name: str, unpickled: Unpickled, written: _Written) -> None:
        """Raise CheckpointError for a file without tensors, or with other ones than expected."""
        lost = [
            key for key, file in self._map.items() if file == name and key not in unpickled.tensors
        ]
        problems = [f"{name} lacks {key}, which {self._index} lists." for key in lost[:8]]
        twice = [key for key in unpickled.tensors if key in written.weight_map]
        problems += [f"{key} is in {name} and in an earlier file." for key in twice[:8]]
        if not unpickled.tensors:
            problems.append(f"{name} holds no tensors.")
        if problems:
            raise CheckpointError(headline(printable(self.folder), problems), problems)

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
    """Write a safetensors file, in the order of the tensors; yields numbers of bytes.

    The bytes are those of the safetensors library with the metadata {"format": "pt"}.

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
