"""A checkpoint folder as it lies on disk: known by its headers and its index, never loaded.

Every problem of a folder is collected before anything is raised, so that one look tells all.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from distprune.files.errors import CheckpointError, counted
from distprune.files.header import TensorEntry, WeightFile, load_json, read_header

_INDEX = ".safetensors.index.json"
_SINGLE = "model.safetensors"
# The same weights in other formats: beside pruned weights they would be stale.
_OTHER_WEIGHTS = (
    "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data",
    "*.safetensors", "*.bin.index.json", "*.safetensors.index.json",
)  # fmt: skip
_NOT_COPIED_FOLDERS = {".git": "git's own data", ".cache": "a download cache"}
SIDECAR = "distprune"  # the folder, inside a pruned checkpoint, of masks and report
# Formats whose stored numbers are no weights; fp8 is told by the dtype of the tensors.
_FP8_METHODS = ("fp8", "fbgemm_fp8")
_MAX_INDEX_BYTES = 200_000_000


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file beside the weights that belongs to the checkpoint.

    Attributes:
        name: relative to the folder.
        path: where to read it, links resolved.
        size, mtime_ns: as they were when the folder was read.
    """

    name: str
    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a folder holds.

    Attributes:
        folder: as it was given.
        files: the safetensors files, by name.
        index: name of the index file; None for a single file.
        config: of config.json; empty if there is none.
        others: files to copy, the index and the config among them.
        skipped: (name, reason) of what is not part of the checkpoint.
    """

    folder: str
    files: tuple[WeightFile, ...]
    index: str | None
    config: dict[str, Any]
    others: tuple[OtherFile, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """Of all files, in the order of files and data."""
        return tuple(tensor for file in self.files for tensor in file.tensors)

    @property
    def num_bytes(self) -> int:
        """Of all safetensors files."""
        return sum(file.size for file in self.files)


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Read the headers and the index of a checkpoint folder.

    Understands one safetensors file or many with an index, links into a Hugging Face
    cache, and folders that cannot be written to. Nothing is opened for writing.

    Raises:
        CheckpointError: with every problem that was found.

    Cost: a fraction of a millisecond per file; the weights are not read.
    """
    folder = os.fspath(source)
    if not os.path.isdir(folder):
        found = "is a file" if os.path.exists(folder) else "does not exist"
        raise CheckpointError(
            f"{folder} {found}; expected a folder with safetensors files, such as a Hugging Face "
            "checkpoint (a snapshot of the cache will do)."
        )
    problems: list[str] = []
    names, skipped = _walk(folder, problems)
    top = sorted(name for name in names if os.sep not in name)
    index, shards, weight_map = _find_weights(folder, top, problems)
    files = []
    for name in shards:
        try:
            files.append(read_header(os.path.join(folder, name), name))
        except CheckpointError as error:
            problems += error.problems or (error.headline,)
    is_whole = len(files) == len(shards)
    problems += _check_keys(files, weight_map, index, is_whole)
    config = _read_config(folder, names, problems)
    others: list[OtherFile] = []
    for name in sorted(set(names) - set(shards)):
        if name != index and any(fnmatch(os.path.basename(name), p) for p in _OTHER_WEIGHTS):
            skipped.append((name, "weights that are no part of this checkpoint"))
        else:
            others.append(_other(folder, name))
    if problems:
        raise CheckpointError(counted(folder, problems), problems)
    return Checkpoint(folder, tuple(files), index, config, tuple(others), tuple(sorted(skipped)))


def _walk(folder: str, problems: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Names of all regular files, relative to the folder; and what is left out, with reasons."""
    names: list[str] = []
    skipped: list[tuple[str, str]] = []
    pending = [""]
    while pending:
        inner = pending.pop()
        try:
            entries = sorted(os.scandir(os.path.join(folder, inner)), key=lambda entry: entry.name)
        except OSError as error:
            problems.append(f"{inner or folder} cannot be listed: {error.strerror}.")
            continue
        for entry in entries:
            name = os.path.join(inner, entry.name)
            if entry.is_dir(follow_symlinks=False):
                if entry.name in _NOT_COPIED_FOLDERS:
                    skipped.append((name, _NOT_COPIED_FOLDERS[entry.name]))
                elif name == SIDECAR:
                    skipped.append((name, "the report of an earlier pruning"))
                else:
                    pending.append(name)
            elif entry.is_dir():
                skipped.append((name, "a link to a folder"))
            elif entry.is_file():
                names.append(name)
            elif entry.is_symlink() and not os.path.exists(entry.path):
                problems.append(
                    f"{name} is a link to {os.readlink(entry.path)}, which does not exist; "
                    "download it again."
                )
            else:
                skipped.append((name, "no regular file"))
    return names, skipped


def _find_weights(
    folder: str, top: list[str], problems: list[str]
) -> tuple[str | None, list[str], dict[str, str]]:
    """The index, if there is one; the safetensors files of the checkpoint; the index's map."""
    indices = [name for name in top if name.endswith(_INDEX)]
    weights = [
        name
        for name in top
        if name.endswith(".safetensors") and not name.startswith("consolidated")
    ]
    if len(indices) > 1:
        problems.append(f"has {len(indices)} indices ({', '.join(indices)}); expected one.")
        return None, [], {}
    if indices:
        if _SINGLE in weights:
            problems.append(
                f"has both {_SINGLE} and {indices[0]}, and programs differ in which one they read; "
                "remove the one that is stale."
            )
        weight_map = _read_index(folder, indices[0], problems)
        return indices[0], sorted(set(weight_map.values())), weight_map
    if _SINGLE in weights:
        return None, [_SINGLE], {}
    if len(weights) == 1:
        return None, weights, {}
    if weights:
        problems.append(
            f"has {len(weights)} safetensors files ({', '.join(weights[:3])}, ...) and no index; "
            f"expected model{_INDEX} to say which belong together."
        )
    elif any(name.endswith((".bin", ".pt", ".pth")) for name in top):
        problems.append(
            "holds pickled weights (.bin, .pt); expected safetensors. Convert it: "
            "AutoModel.from_pretrained(SRC).save_pretrained(NEW, safe_serialization=True)."
        )
    else:
        problems.append("holds no safetensors file.")
    return None, [], {}


def _read_index(folder: str, name: str, problems: list[str]) -> dict[str, str]:
    """The weight map of an index, without the files that it cannot mean."""
    path = os.path.join(folder, name)
    try:
        if os.path.getsize(path) > _MAX_INDEX_BYTES:
            raise CheckpointError(f"{name} has more than {_MAX_INDEX_BYTES} bytes.")
        index = load_json(Path(path).read_bytes(), name)
    except OSError as error:
        problems.append(f"{name} cannot be read: {error.strerror}.")
        return {}
    except CheckpointError as error:
        problems.append(error.headline)
        return {}
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        problems.append(f"{name} has no weight_map, or an empty one.")
        return {}
    good: dict[str, str] = {}
    bad: set[str] = set()
    for key, file in weight_map.items():
        if _is_plain_name(file):
            good[key] = file
        else:
            bad.add(ascii(file)[:100])
    problems += [
        f"{name}: {file} is no plain name of a safetensors file in this folder."
        for file in sorted(bad)
    ]
    missing = sorted({f for f in good.values() if not os.path.exists(os.path.join(folder, f))})
    problems += [f"{file} is missing; {name} needs it." for file in missing]
    return {key: file for key, file in good.items() if file not in missing}


def _is_plain_name(file: object) -> bool:
    return (
        isinstance(file, str)
        and file.endswith(".safetensors")
        and not file.startswith(".")
        and not set(file) & set('/\\\0:*?"<>|')
        and file.isprintable()
    )


def _check_keys(
    files: list[WeightFile], weight_map: dict[str, str], index: str | None, is_whole: bool
) -> list[str]:
    """Each tensor once, and where the index says."""
    problems = []
    where: dict[str, list[str]] = {}
    for file in files:
        for tensor in file.tensors:
            where.setdefault(tensor.name, []).append(file.name)
    problems += [
        f"tensor {name} is in {' and in '.join(found)}."
        for name, found in where.items()
        if len(found) > 1
    ]
    if not any(file.tensors for file in files) and is_whole and not problems and files:
        problems.append("its safetensors files hold no tensor.")
    if index is None:
        return problems
    read = {file.name for file in files}
    lost = [k for k, file in weight_map.items() if file in read and file not in where.get(k, ())]
    problems += _listed(lost, f"{index} lists tensors that are not in their file", weight_map)
    extra = [name for name in where if name not in weight_map]
    problems += _listed(extra, f"files hold tensors that {index} does not list", where)
    return problems


def _listed(names: Iterable[str], what: str, where: dict[str, Any]) -> list[str]:
    names = list(names)
    if not names:
        return []
    shown = ", ".join(f"{name} ({_place(where[name])})" for name in names[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return [f"{what}: {shown}{more}."]


def _place(where: str | list[str]) -> str:
    return where if isinstance(where, str) else where[0]


def _read_config(folder: str, names: list[str], problems: list[str]) -> dict[str, Any]:
    """config.json, which says whether weights are quantised or tied."""
    if "config.json" not in names:
        return {}
    try:
        config = json.loads(Path(folder, "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"config.json cannot be read: {error}.")
        return {}
    if not isinstance(config, dict):
        problems.append("config.json is no JSON object.")
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


def _other(folder: str, name: str) -> OtherFile:
    path = os.path.realpath(os.path.join(folder, name))
    info = os.stat(path)
    assert stat.S_ISREG(info.st_mode), name
    return OtherFile(name, path, info.st_size, info.st_mtime_ns)
