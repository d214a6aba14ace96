"""A checkpoint on disk, described by its headers and its index; weights are not loaded.

[Note: header] A safetensors file is the length n of the header (8 bytes, little-endian), the
header, and data::

    | n |{"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "b": ...}|aaaaaa|bbb...|
    0   8                                                                         8 + n

The byte ranges of the tensors must cover the data exactly, without overlap. The ``safetensors``
package refuses dtypes that are merely copied, and maps the data, which can end in SIGBUS.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from distprune.base.float_formats import DTYPE_BITS
from distprune.base.report_text import listed
from distprune.files.disk import reading
from distprune.files.errors import CheckpointError

INDEX_SUFFIX = ".safetensors.index.json"  # of the file that maps tensors to files
SIDECAR = "distprune"  # the folder, inside a pruned checkpoint, of masks and report
_SINGLE = "model.safetensors"  # the name of a file without an index
_CONFIGS = ("config.json", "params.json", "adapter_config.json")
_NOT_COPIED_FOLDERS = {
    ".git": "git's own data",
    ".cache": "a download cache",
    SIDECAR: "the report of an earlier pruning",
}
_WEIGHTS = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.ckpt.*", "*.npz", "*.pkl", "*.h5",
    "*.msgpack", "*.ot", "*.gguf", "*.ggml", "*.onnx", "*.onnx_data*", "*.onnx.data", "*.tflite",
    "*.mlmodel", "saved_model.pb", "openvino_model*.xml", "*.index.json",
)  # fmt: skip
_TOKENIZERS = ("*vocab*", "*tokenizer*", "*sentencepiece*", "*.spm.bin")
# Weights of another part than the model: of an adapter, of the layers of sentence-transformers.
_PARTS = ("adapter_model.*", "[0-9]_*/model.safetensors", "[0-9]_*/pytorch_model.bin")
_PERMISSIONS = 0o777  # without set-user-ID and the like
# Quantisation methods that are accepted: fp8 tensors are recognised by their dtype.
_FP8_METHODS = ("fp8", "fbgemm_fp8")


class TensorEntry(NamedTuple):  # which is made in a third of the time of a frozen dataclass
    """A tensor as a header describes it.

    Attributes:
        name: the name of the tensor.
        dtype: as in the header, for example "BF16"; may be unknown.
        shape: () for a scalar.
        numel: the number of elements.
        file: name of its file, relative to the checkpoint.
        start, stop: its byte range, counted from the beginning of the file.
        path: of the file itself, links resolved.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    numel: int
    file: str
    start: int
    stop: int
    path: str

    @property
    def nbytes(self) -> int:
        """The number of bytes in the file."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file, described by its header.

    Attributes:
        name: relative to the checkpoint.
        path: the path of the file itself, links resolved.
        size, mtime_ns: when the header was read; if they change, the file has changed.
        header_crc: crc32 of the header, and of the bytes before it.
        metadata: the header's ``__metadata__``.
        tensors: in the order of the data.
        mode: permissions; a copy gets them, less the umask.
    """

    name: str
    path: str
    size: int
    mtime_ns: int
    header_crc: int
    metadata: dict[str, str]
    tensors: tuple[TensorEntry, ...]
    mode: int = 0o666


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
            :func:`locate`.

    Raises:
        CheckpointError: it is malformed, incomplete, not supported, or cannot be read.

    Cost: a fraction of a millisecond per file; the weights are not read.
    """
    folder, name = locate(source)
    path, note = os.fspath(source), ""
    is_alone = bool(name) and not any(os.path.exists(os.path.join(folder, c)) for c in _CONFIGS)
    if is_alone:
        note = (
            f"{path} has no config.json beside it, so it is the whole checkpoint: other files of "
            "its folder are ignored."
        )
    elif not os.path.lexists(path):
        note = f"{path} is {folder}."
    with reading(folder):
        top = sorted(os.listdir(folder))
    index, names, weight_map = None, [name], None
    if not is_alone:
        index, names, weight_map = _find_weights(folder, name, top)
    files = [read_header(os.path.join(folder, each), each) for each in names]
    _check_tensors(files, index, weight_map)
    others, skipped = ([], []) if is_alone else _list(folder, {*names, index})
    config = {} if is_alone else _read_config(os.path.join(folder, "config.json"))
    return Checkpoint(
        folder, tuple(files), index, config, tuple(others), tuple(skipped), note, is_alone
    )


def locate(source: str | Path) -> tuple[str, str]:
    """The folder of a checkpoint, and the name of its file if only one counts ("" if all do).

    A path that exists is a folder, a safetensors file or its index. Any other name is that of a
    model in the cache of huggingface_hub; nothing is downloaded.

    Raises:
        CheckpointError: the source does not exist or cannot be read.

    Cost: a few system calls.
    """
    path = os.fspath(source)
    if os.path.isdir(path):
        return path, ""
    if os.path.lexists(path):
        folder, name = os.path.split(path)
        if not name.endswith((INDEX_SUFFIX, ".safetensors")):
            raise CheckpointError(
                f"{path} is not a safetensors file; expected such a file, or a folder with them."
            )
        return folder or os.curdir, "" if name.endswith(INDEX_SUFFIX) else name
    try:
        from huggingface_hub import snapshot_download

        return snapshot_download(path, local_files_only=True), ""
    except (ImportError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} does not exist, neither as a path nor as a model that was downloaded; "
            "expected a folder with safetensors files, such a file, or the name of a model "
            f"(org/name) in the cache of huggingface_hub: {str(error).splitlines()[0]}"
        ) from error


def _find_weights(
    folder: str, name: str, top: Sequence[str]
) -> tuple[str | None, list[str], dict[str, str] | None]:
    """The index, the weight files, and the file of each tensor by the index.

    Args:
        name: of the only file that counts; "" if all do.
        top: the names in the folder.
    """
    indices = [each for each in top if each.endswith(INDEX_SUFFIX)]
    if f"model{INDEX_SUFFIX}" in indices:
        indices = [f"model{INDEX_SUFFIX}"]
    if name:
        names = {file for index in indices for file in _read_index(folder, index).values()}
        if name in names and len(names) > 1:
            raise CheckpointError(
                f"{name} is one of {len(names)} files that {indices[0]} lists; expected all of "
                f"them: give the folder, {folder}."
            )
        return None, [name], None
    weights = [each for each in top if each.endswith(".safetensors")]
    if len(indices) > 1:
        raise CheckpointError(f"{folder} has {', '.join(indices)}; expected one index.")
    if indices and _SINGLE in weights:
        raise CheckpointError(
            f"{folder} has both {_SINGLE} and {indices[0]}, and programs differ in which one they "
            f"read; remove the one that is stale, or give {os.path.join(folder, _SINGLE)} itself."
        )
    if indices:
        weight_map = _read_index(folder, indices[0])
        return indices[0], sorted(set(weight_map.values())), weight_map
    if _SINGLE in weights:
        weights = [_SINGLE]
    if len(weights) != 1:
        has = listed(weights or top, 8) or "no files"
        raise CheckpointError(
            f"expected safetensors files in {folder}: {_SINGLE}, another single one, or several "
            f"with an index (*{INDEX_SUFFIX}); it has {has}."
        )
    return None, weights, None


def _read_index(folder: str, name: str) -> dict[str, str]:
    """The weight map of an index, whose files are names in the folder."""
    path = os.path.join(folder, name)
    with reading(path):
        index = load_json(Path(path).read_bytes(), path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map, or an empty one.")
    for file in weight_map.values():
        is_name = isinstance(file, str) and os.path.basename(file) == file
        if not (is_name and file.endswith(".safetensors")):
            raise CheckpointError(
                f"{path} lists {file!a}; expected the name of a safetensors file in its folder."
            )
    return weight_map


def _check_tensors(
    files: Sequence[WeightFile], index: str | None, weight_map: dict[str, str] | None
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
    if weight_map is not None and file_of != weight_map:
        name = min(name for name, _ in file_of.items() ^ weight_map.items())
        raise CheckpointError(
            f"tensor {name} is in {file_of.get(name, 'no file')}; expected "
            f"{weight_map.get(name, 'no such tensor')}, as {index} says."
        )


def _list(folder: str, own: set[str | None]) -> tuple[list[OtherFile], list[tuple[str, str]]]:
    """The other files of a folder, links followed, and (name, reason) of what is skipped.

    Args:
        folder: an existing one.
        own: names of the weight files and of the index.
    """
    others: list[OtherFile] = []
    skipped: list[tuple[str, str]] = []
    with reading(folder):
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
                elif inside not in own and _is_weights(inside):
                    skipped.append((inside, "weights that are not pruned, or state of training"))
                elif inside not in own or inside.endswith(INDEX_SUFFIX):
                    real, mode = os.path.realpath(full), info.st_mode & _PERMISSIONS
                    others.append(OtherFile(inside, real, info.st_size, info.st_mtime_ns, mode))
    return sorted(others, key=attrgetter("name")), sorted(skipped)


def _raise(error: OSError) -> None:
    raise error


def _is_weights(name: str) -> bool:
    """Whether a file holds weights of the model, an index of them, or state of training.

    Such files are not copied: beside pruned weights they would be stale, and a program that prefers
    their form would load dense weights.
    """
    base = os.path.basename(name).lower()
    return (
        not any(fnmatchcase(name, pattern) for pattern in _PARTS)
        and any(fnmatchcase(base, pattern) for pattern in _WEIGHTS)
        and not any(fnmatchcase(base, pattern) for pattern in _TOKENIZERS)
    )


def _read_config(path: str) -> dict[str, Any]:
    """config.json; empty if there is none; raises CheckpointError if the weights are quantised."""
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


def read_header(path: str | Path, name: str | None = None) -> WeightFile:
    """Read and check the header of a file.

    Args:
        path: the path of the file; links are followed.
        name: the name of the file in messages and entries; by default the last part of the path.

    Raises:
        CheckpointError: the file cannot be read, or is malformed; the first problem.

    Cost: two reads, and memory in proportion to the header; the data is not read.
    """
    name = os.path.basename(path) if name is None else name
    with reading(name), open(path, "rb") as file:
        info = os.fstat(file.fileno())
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= info.st_size - 8:
            raise CheckpointError(
                f"{name} is truncated, or not a safetensors file: it has {info.st_size} bytes, "
                f"and its header should have {length}."
            )
        file.seek(0)
        raw = file.read(8 + length)
    path, start = os.path.realpath(path), 8 + length
    header = load_json(raw[8:], f"{name}: the header")
    tensors = []
    try:
        metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
        for tensor, fields in header.items():
            dtype, shape = str(fields["dtype"]), tuple(fields["shape"])
            first, last = fields["data_offsets"]
            if not all(type(size) is int and size >= 0 for size in (first, last, *shape)):
                raise ValueError(f"{tensor!a} has the sizes {shape}, {first} and {last}")
            numel, first, last = math.prod(shape), start + first, start + last
            tensors.append(TensorEntry(tensor, dtype, shape, numel, name, first, last, path))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{name}: the header is malformed: {error}.") from None
    tensors.sort(key=attrgetter("start", "stop"))
    for entry in tensors:
        bits = DTYPE_BITS.get(entry.dtype)
        fits = bits is None or entry.numel * bits == 8 * entry.nbytes
        if entry.start != start or entry.nbytes < 0 or not fits:
            raise CheckpointError(
                f"{name}: tensor {entry.name!a} is {entry.dtype} of shape {list(entry.shape)} in "
                f"the bytes {entry.start} to {entry.stop}; expected the bytes from {start}, where "
                "the previous one ends, that it needs."
            )
        start = entry.stop
    if start != info.st_size:
        raise CheckpointError(
            f"{name} has {info.st_size} bytes; expected {start}, where its tensors end. It is "
            "truncated, or not complete."
        )
    mode, crc = info.st_mode & _PERMISSIONS, zlib.crc32(raw)
    return WeightFile(
        name, path, info.st_size, info.st_mtime_ns, crc, metadata, tuple(tensors), mode
    )


def make_header(
    tensors: Mapping[str, tuple[str, Sequence[int], int]],
    metadata: Mapping[str, str],
) -> tuple[bytes, dict[str, int]]:
    """The header of a file, with its length in front; and by tensor, where it begins in the file.

    Args:
        tensors: by name, in the order of the data: dtype, shape and number of bytes.
        metadata: texts.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    offsets, end = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        offsets[name] = end
        end += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    start = 8 + len(raw)
    return len(raw).to_bytes(8, "little") + raw, {name: start + n for name, n in offsets.items()}


def load_json(raw: bytes | str, what: str) -> Any:
    """Parse JSON; raises CheckpointError if it is malformed.

    Args:
        raw: the JSON, in UTF-8.
        what: subject of the error message.
    """
    try:
        return json.loads(raw)
    except (RecursionError, ValueError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}.") from None
