"""A checkpoint on disk, described by its headers and its index; weights are not loaded.

All problems of a folder are collected, and raised as one error.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from distprune._common.report_text import listed
from distprune.files.checkpoints.header import INDEX_SUFFIX, TensorEntry, WeightFile, read_header
from distprune.files.checkpoints.locating import (
    Location,
    find_weights,
    is_weights,
    locate,
    why_duplicate,
)
from distprune.files.disk.listing import (
    Listing,
    OtherFile,
    list_files,
    list_one,
    unreadable,
)
from distprune.files.errors import CheckpointError, headline
from distprune.files.text import printable

_NOT_COPIED_FOLDERS = {".git": "git's own data", ".cache": "a download cache"}
SIDECAR = "distprune"  # the folder, inside a pruned checkpoint, of masks and report
# Quantisation methods that are accepted: fp8 tensors are recognised by their dtype.
_FP8_METHODS = ("fp8", "fbgemm_fp8")

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
        folders: (name, permissions) of the folder ("") and of its subfolders with files of the
            checkpoint.
        note: a sentence for the user on how the checkpoint was found; may be empty.
        is_alone: whether it is one file, to which nothing else in the folder belongs.
    """

    folder: str
    files: tuple[WeightFile, ...]
    index: str | None
    config: dict[str, Any]
    others: tuple[OtherFile, ...]
    skipped: tuple[tuple[str, str], ...]
    folders: tuple[tuple[str, int], ...] = ()
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
    def unpruned_weights(self) -> tuple[str, ...]:
        """Names of other files that hold weights, which are copied unchanged."""
        return tuple(other.name for other in self.others if is_weights(other.name))

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
        CheckpointError: with all problems.

    Cost: a fraction of a millisecond per file; the weights are not read.
    """
    location = locate(source)
    folder = location.folder
    listing = _list(location)
    problems = listing.problems
    index, shards, weight_map = find_weights(location, listing, problems)
    files = []
    for name in shards:
        try:
            files.append(read_header(os.path.join(folder, name), name))
        except CheckpointError as error:
            problems += error.problems or (error.headline,)
    is_whole = len(files) == len(shards)
    problems += _check_keys(files, weight_map, index, is_whole)
    config = _read_config(folder, listing, problems)
    others: list[OtherFile] = []
    tensors = {tensor.name for file in files for tensor in file.tensors}
    for name in sorted(set(listing.files) - set(shards)):
        reason = None if name == index else why_duplicate(folder, name, tensors)
        if reason:
            listing.skipped.append((name, reason))
        else:
            others.append(listing.files[name])
    if shards or index:  # else there is nothing to copy
        problems += unreadable(others if shards else listing.files.values())
    problems = list(dict.fromkeys(problems))  # without duplicates
    if problems:
        raise CheckpointError(headline(printable(folder), problems), problems)
    all_names = [*(file.name for file in files), *(other.name for other in others)]
    above = {str(up) for name in all_names for up in PurePath(name).parents}
    names = sorted({"", *above} - {"."})  # of folders that hold one of the files
    return Checkpoint(
        folder=folder,
        files=tuple(files),
        index=index,
        config=config,
        others=tuple(others),
        skipped=tuple(sorted(listing.skipped)),
        folders=tuple((name, listing.folders[name]) for name in names),
        note=location.note,
        is_alone=location.is_alone,
    )


def _list(location: Location) -> Listing:
    """The files of a checkpoint."""
    if location.is_alone and location.file is not None:
        return list_one(location.folder, location.file)
    return list_files(location.folder, why_left_out, suffixes=(".safetensors", INDEX_SUFFIX))


def why_left_out(name: str) -> str | None:
    """Why a subfolder is not part of a checkpoint; None if it is."""
    if name == SIDECAR:
        return "the report of an earlier pruning"
    return _NOT_COPIED_FOLDERS.get(os.path.basename(name))


def _check_keys(
    files: list[WeightFile], weight_map: dict[str, str], index: str | None, is_whole: bool
) -> list[str]:
    """Problems of tensors that occur twice, or in another file than the index says."""
    problems: list[str] = []
    file_of = {tensor.name: file.name for file in files for tensor in file.tensors}
    are_unique = len(file_of) == sum(len(file.tensors) for file in files)
    if file_of and are_unique and (index is None or file_of == weight_map):
        return problems
    where: dict[str, list[str]] = {}
    for file in files:
        for tensor in file.tensors:
            where.setdefault(tensor.name, []).append(file.name)
    problems += [
        f"tensor {name} is in {' and in '.join(of_name)}."
        for name, of_name in where.items()
        if len(of_name) > 1
    ]
    if not any(file.tensors for file in files) and is_whole and not problems and files:
        problems.append("its safetensors files hold no tensors.")
    if index is None:
        return problems
    read = {file.name for file in files}
    lost = [k for k, file in weight_map.items() if file in read and file not in where.get(k, ())]
    if lost:
        shown = listed((f"{name} ({weight_map[name]})" for name in lost), 4)
        problems.append(f"{index} lists tensors that are not in their file: {shown}.")
    extra = [f"{name} ({where[name][0]})" for name in where if name not in weight_map]
    if extra:
        problems.append(f"files hold tensors that {index} does not list: {listed(extra, 4)}.")
    return problems


def _read_config(folder: str, listing: Listing, problems: list[str]) -> dict[str, Any]:
    """config.json; a quantised checkpoint is a problem."""
    if "config.json" not in listing.files:
        return {}
    try:
        config = json.loads(Path(folder, "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problems.append(f"config.json cannot be read: {reason}.")
        return {}
    if not isinstance(config, dict):
        problems.append("config.json is not a JSON object.")
        return {}
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        if method not in _FP8_METHODS:
            problems.append(
                f"config.json has a quantization_config (quant_method {method!r}): the stored "
                "numbers are codes, not weights. Prune the checkpoint that it was made from."
            )
    return config
