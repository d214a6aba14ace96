"""A checkpoint on disk, described by its headers and its index; weights are not loaded."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

from distprune.files.checkpoints.header import (
    INDEX_SUFFIX,
    TensorEntry,
    WeightFile,
    load_json,
    read_header,
)
from distprune.files.checkpoints.locating import find_weights, is_weights, locate
from distprune.files.disk.access import reading
from distprune.files.errors import CheckpointError

SIDECAR = "distprune"  # the folder, inside a pruned checkpoint, of masks and report
_NOT_COPIED_FOLDERS = {
    ".git": "git's own data",
    ".cache": "a download cache",
    SIDECAR: "the report of an earlier pruning",
}
_PERMISSIONS = 0o777  # without set-user-ID and the like
# Quantisation methods that are accepted: fp8 tensors are recognised by their dtype.
_FP8_METHODS = ("fp8", "fbgemm_fp8")


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file of the checkpoint that is not a safetensors file with weights.

    Attributes:
        name: relative to the folder.
        path: where to read it, links resolved.
        size, mtime_ns: when the folder was listed.
        mode: permissions; a copy gets them, less the umask.
    """

    name: str
    path: str
    size: int
    mtime_ns: int
    mode: int


SourceFile: TypeAlias = WeightFile | OtherFile


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's files, tensors and config.

    Attributes:
        folder: from the caller, or of the snapshot that was found.
        files: the safetensors files, by name.
        index: name of the index file; None for a single file.
        config: the content of config.json; empty if there is none.
        others: files to copy, the index and the config among them.
        skipped: (name, reason) of what is not part of the checkpoint, and not copied.
        note: a sentence for the user on how the checkpoint was found; may be empty.
        is_alone: whether it is one file, to which nothing else in the folder belongs.
    """

    folder: str
    files: tuple[WeightFile, ...]
    index: str | None
    config: dict[str, Any]
    others: tuple[OtherFile, ...]
    skipped: tuple[tuple[str, str], ...]
    note: str = ""
    is_alone: bool = False

    @property
    def root(self) -> str:
        """The path of the folder, or of the one file; no result may be inside it."""
        return os.path.join(self.folder, self.files[0].name) if self.is_alone else self.folder

    @property
    def all_files(self) -> tuple[SourceFile, ...]:
        """The safetensors files, then the others."""
        return (*self.files, *self.others)

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """The tensors of all files, in the order of files and data."""
        return tuple(itertools.chain.from_iterable(file.tensors for file in self.files))

    @property
    def num_bytes(self) -> int:
        """The size of all safetensors files."""
        return sum(file.size for file in self.files)


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Read the headers and the index of a checkpoint folder.

    Reads one safetensors file, or many with an index, also through links into a Hugging Face
    cache and in read-only folders. Nothing is opened for writing.

    Args:
        source: a folder, a safetensors file, or a model in the local hub cache: see
            :func:`distprune.files.checkpoints.locating.locate`.

    Raises:
        CheckpointError: it is malformed, incomplete, not supported, or cannot be read.

    Cost: a fraction of a millisecond per file; the weights are not read.
    """
    location = locate(source)
    folder = location.folder
    index, names, weight_map = find_weights(location)
    files = [read_header(os.path.join(folder, name), name) for name in names]
    _check_tensors(files, index, weight_map)
    with reading(folder):
        listed = ([], []) if location.is_alone else _list(folder, {*names, index})
    return Checkpoint(
        folder=folder,
        files=tuple(files),
        index=index,
        config={} if location.is_alone else _read_config(os.path.join(folder, "config.json")),
        others=tuple(listed[0]),
        skipped=tuple(listed[1]),
        note=location.note,
        is_alone=location.is_alone,
    )


def _list(folder: str, own: set[str | None]) -> tuple[list[OtherFile], list[tuple[str, str]]]:
    """The other files of a folder, and (name, reason) of what is skipped.

    Args:
        folder: an existing one; a link in it is read like what it points to.
        own: names of the weight files and of the index.
    """
    others: list[OtherFile] = []
    skipped: list[tuple[str, str]] = []
    for path, inner, names in os.walk(folder, onerror=_raise, followlinks=True):
        where = os.path.relpath(path, folder) if path != folder else ""
        for name in [name for name in inner if name in _NOT_COPIED_FOLDERS]:
            inner.remove(name)
            skipped.append((os.path.join(where, name), _NOT_COPIED_FOLDERS[name]))
        for name in names:
            full, inside = os.path.join(path, name), os.path.join(where, name)
            info = os.stat(full)
            if not stat.S_ISREG(info.st_mode):
                skipped.append((inside, "no regular file"))
            elif inside not in own and is_weights(inside):
                skipped.append((inside, "weights that are not pruned, or state of training"))
            elif inside not in own or inside.endswith(INDEX_SUFFIX):
                real, mode = os.path.realpath(full), info.st_mode & _PERMISSIONS
                others.append(OtherFile(inside, real, info.st_size, info.st_mtime_ns, mode))
    return sorted(others, key=attrgetter("name")), sorted(skipped)


def _raise(error: OSError) -> None:
    raise error


def _check_tensors(
    files: Sequence[WeightFile], index: str | None, weight_map: dict[str, str]
) -> None:
    """Raise CheckpointError if a tensor is in two files, or not where the index says."""
    file_of: dict[str, str] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in file_of:
                raise CheckpointError(
                    f"tensor {tensor.name} is in {file_of[tensor.name]} and in {file.name}."
                )
            file_of[tensor.name] = file.name
    if not file_of:
        raise CheckpointError(f"{', '.join(file.name for file in files)}: no tensors.")
    if index is not None and file_of != weight_map:
        name = min(name for name, _ in file_of.items() ^ weight_map.items())
        raise CheckpointError(
            f"tensor {name} is in {file_of.get(name, 'no file')}; expected "
            f"{weight_map.get(name, 'no such tensor')}, as {index} says."
        )


def _read_config(path: str) -> dict[str, Any]:
    """config.json; empty if there is none.

    Raises:
        CheckpointError: it cannot be read, or the weights are quantised.
    """
    if not os.path.exists(path):
        return {}
    with reading(path):
        config = load_json(Path(path).read_bytes(), path)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        if method not in _FP8_METHODS:
            raise CheckpointError(
                f"{path} has a quantization_config (quant_method {method!r}): the stored numbers "
                "are codes, not weights. Prune the checkpoint that it was made from."
            )
    return config
