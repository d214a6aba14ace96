"""A checkpoint on disk, described by its headers and its index; weights are not loaded.

[Note: header] A safetensors file is the length n of the header (8 bytes, little-endian), the
header, and data::

    | n |{"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "b": ...}|aaaaaa|bbb...|
    0   8                                                                         8 + n

The byte ranges of the tensors must cover the data exactly, without overlap. The ``safetensors``
package refuses dtypes that are merely copied, and maps the data, which can end in SIGBUS.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from distprune.base.amount import listed
from distprune.base.selecting import DTYPE_BITS
from distprune.files.disk import SIDECAR, reading
from distprune.files.errors import CheckpointError

INDEX_SUFFIX = ".safetensors.index.json"  # of the file that maps tensors to files
_SINGLE = "model.safetensors"  # the name of a file without an index
_NOT_COPIED_FOLDERS = (".git", ".cache", SIDECAR)
# Weights of the model, an index of them, or state of training: by name, in lower case, unless the
# file belongs to a tokenizer or to another part, such as an adapter or sentence-transformers.
_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|npz|pkl|h5|msgpack|ot|gguf|ggml|tflite|mlmodel|index\.json)"
    r"|.*\.ckpt(\..*)?|.*\.onnx([_.]data.*)?|saved_model\.pb|openvino_model.*\.xml",
    re.DOTALL,  # names may have line breaks
)
_TOKENIZERS = re.compile(r".*(vocab|tokenizer|sentencepiece).*|.*\.spm\.bin")
_PARTS = re.compile(r"adapter_model\..*|[0-9]_.*/(model\.safetensors|pytorch_model\.bin)")
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
class SourceFile:
    """A file of a checkpoint.

    Attributes:
        name: relative to the checkpoint.
        path: the path of the file itself, links resolved.
        size, mtime_ns: when the folder was read; if they change, the file has changed.
        mode: permissions; a copy gets them, less the umask.
        tensors: of a safetensors file, in the order of the data.
        metadata: the ``__metadata__`` of its header.
        header_crc: crc32 of its header, and of the bytes before it.
    """

    name: str
    path: str
    size: int
    mtime_ns: int
    mode: int
    tensors: tuple[TensorEntry, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    header_crc: int = 0

    @classmethod
    def of(cls, path: str, name: str) -> SourceFile:
        """A file as it is now; raises OSError."""
        info = os.stat(path)
        mode = info.st_mode & _PERMISSIONS
        return cls(name, os.path.realpath(path), info.st_size, info.st_mtime_ns, mode)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's files, tensors and config.

    Attributes:
        folder: of its files.
        files: the safetensors files, by name.
        tensors: those of all files, in the order of files and data.
        config: the content of config.json; empty if there is none.
        others: files to copy, the index and the config among them.
        skipped: (name, reason) of what is not part of the checkpoint, and not copied.
        root: the path of the folder, or of the one file that it is; no result may be inside it.
        note: a sentence for the user on how the checkpoint was found; may be empty.
    """

    folder: str
    files: tuple[SourceFile, ...]
    tensors: tuple[TensorEntry, ...]
    config: dict[str, Any]
    others: tuple[SourceFile, ...]
    skipped: tuple[tuple[str, str], ...]
    root: str
    note: str = ""

    @property
    def all_files(self) -> tuple[SourceFile, ...]:
        """The safetensors files, then the others."""
        return (*self.files, *self.others)

    @property
    def num_bytes(self) -> int:
        """The size of all safetensors files."""
        return sum(file.size for file in self.files)


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Read the headers and the index of a checkpoint.

    Reads one safetensors file, or many with an index, also through links into a Hugging Face
    cache and in read-only folders. Nothing is opened for writing.

    Args:
        source: a folder; a model in the local hub cache (see :func:`locate`); or a safetensors
            file, beside which nothing is read.

    Raises:
        CheckpointError: it is malformed, incomplete, not supported, or cannot be read.

    Cost: a fraction of a millisecond per file; the weights are not read.
    """
    root = locate(source)
    if os.path.isfile(root):
        if not root.endswith(".safetensors"):
            raise CheckpointError(
                f"{root} is not a safetensors file; expected such a file, or a folder with them."
            )
        folder, name = os.path.split(root)
        note = f"{root} is the whole checkpoint: other files of its folder are ignored."
        files = [read_header(root, name)]
        return Checkpoint(
            folder or os.curdir, tuple(files), _tensors_of(files), {}, (), (), root, note
        )
    names, index, weight_map = _find_weights(root)
    files = [read_header(os.path.join(root, name), name) for name in names]
    tensors = _tensors_of(files, index, weight_map)
    config = _read_config(os.path.join(root, "config.json"))
    others, skipped = _list(root, {*names, index})
    note = "" if os.path.lexists(source) else f"{source} is {root}."
    return Checkpoint(root, tuple(files), tensors, config, others, skipped, root, note)


def locate(source: str | Path) -> str:
    """The path of a checkpoint: the given one, or that of a model in huggingface_hub's cache.

    Nothing is downloaded.

    Raises:
        CheckpointError: the source does not exist.
    """
    path = os.fspath(source)
    if os.path.lexists(path):
        return (os.path.dirname(path) or os.curdir) if path.endswith(INDEX_SUFFIX) else path
    try:
        from huggingface_hub import snapshot_download

        return snapshot_download(path, local_files_only=True)
    except (ImportError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} does not exist, neither as a path nor as a model that was downloaded; "
            "expected a folder with safetensors files, such a file, or the name of a model "
            f"(org/name) in the cache of huggingface_hub: {str(error).splitlines()[0]}"
        ) from error


def _find_weights(folder: str) -> tuple[list[str], str | None, dict[str, str] | None]:
    """The weight files of a folder; its index, and the file of each tensor by the index."""
    with reading(folder):
        top = sorted(os.listdir(folder))
    indices = [name for name in top if name.endswith(INDEX_SUFFIX)]
    if f"model{INDEX_SUFFIX}" in indices:
        indices = [f"model{INDEX_SUFFIX}"]
    weights = [name for name in top if name.endswith(".safetensors")]
    several = [name for name in top if name in indices or (indices and name == _SINGLE)]
    if len(several) > 1:
        raise CheckpointError(
            f"{folder} has {' and '.join(several)}, and programs differ in which one they read; "
            "expected one of them. Remove what is stale, or give one safetensors file itself."
        )
    if indices:
        weight_map = _read_index(folder, indices[0])
        return sorted(set(weight_map.values())), indices[0], weight_map
    if _SINGLE in weights:
        weights = [_SINGLE]
    if len(weights) != 1:
        has = listed(weights or top, 8) or "no files"
        raise CheckpointError(
            f"expected safetensors files in {folder}: {_SINGLE}, another single one, or several "
            f"with an index (*{INDEX_SUFFIX}); it has {has}."
        )
    return weights, None, None


def _read_index(folder: str, name: str) -> dict[str, str]:
    """The weight map of an index, whose files are names in the folder."""
    path = os.path.join(folder, name)
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map, or an empty one.")
    for file in weight_map.values():
        if not (isinstance(file, str) and re.fullmatch(r"[^/]+\.safetensors", file)):
            raise CheckpointError(
                f"{path} lists {file!a}; expected the name of a safetensors file in its folder."
            )
    return weight_map


def _tensors_of(
    files: Sequence[SourceFile], index: str | None = None, weight_map: dict[str, str] | None = None
) -> tuple[TensorEntry, ...]:
    """All tensors; raises CheckpointError if one is twice, or not where the index says."""
    file_of: dict[str, str] = {}
    tensors = tuple(tensor for file in files for tensor in file.tensors)
    for tensor in tensors:
        if tensor.name in file_of:
            raise CheckpointError(
                f"tensor {tensor.name} is in {file_of[tensor.name]} and in {tensor.file}."
            )
        file_of[tensor.name] = tensor.file
    if not file_of:
        raise CheckpointError(f"{', '.join(file.name for file in files)}: no tensors.")
    if weight_map is not None and file_of != weight_map:
        name = min(name for name, _ in file_of.items() ^ weight_map.items())
        raise CheckpointError(
            f"tensor {name} is in {file_of.get(name, 'no file')}; expected "
            f"{weight_map.get(name, 'no such tensor')}, as {index} says."
        )
    return tensors


def _list(
    folder: str, own: set[str | None]
) -> tuple[tuple[SourceFile, ...], tuple[tuple[str, str], ...]]:
    """The other files of a folder, links followed, and (name, reason) of what is skipped.

    Args:
        folder: an existing one.
        own: names of the weight files and of the index.
    """
    others: list[SourceFile] = []
    skipped: list[tuple[str, str]] = []
    with reading(folder):
        for path, inner, names in os.walk(folder, onerror=_raise, followlinks=True):
            where = os.path.relpath(path, folder) if path != folder else ""
            for name in [name for name in inner if name in _NOT_COPIED_FOLDERS]:
                inner.remove(name)
                skipped.append((os.path.join(where, name), "no part of the model"))
            for name in names:
                full, inside = os.path.join(path, name), os.path.join(where, name)
                if not stat.S_ISREG(os.stat(full).st_mode):
                    skipped.append((inside, "no regular file"))
                elif inside not in own and _is_weights(inside):
                    skipped.append((inside, "weights that are not pruned, or state of training"))
                elif inside not in own or inside.endswith(INDEX_SUFFIX):
                    others.append(SourceFile.of(full, inside))
    return tuple(sorted(others, key=attrgetter("name"))), tuple(sorted(skipped))


def _raise(error: OSError) -> None:
    raise error


def _is_weights(name: str) -> bool:
    """Whether a file is not copied: beside pruned weights it would be stale, and loaded by some."""
    base = os.path.basename(name).lower()
    is_other = _PARTS.fullmatch(name) or _TOKENIZERS.fullmatch(base)
    return _WEIGHTS.fullmatch(base) is not None and not is_other


def _read_config(path: str) -> dict[str, Any]:
    """config.json; empty if there is none; raises CheckpointError if the weights are quantised."""
    if not os.path.exists(path):
        return {}
    config: dict[str, Any] = read_json(path)
    quantization = config.get("quantization_config") or {}
    if quantization and quantization.get("quant_method") not in _FP8_METHODS:
        raise CheckpointError(
            f"{path} has a quantization_config (quant_method {quantization.get('quant_method')!r}"
            "): the stored numbers are codes, not weights. Prune the checkpoint that it was made "
            "from."
        )
    return config


def read_header(path: str | Path, name: str | None = None) -> SourceFile:
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
        size = os.fstat(file.fileno()).st_size
        raw = file.read(8)
        length = int.from_bytes(raw, "little")
        if not 0 < length <= size - 8:
            raise CheckpointError(
                f"{name} is truncated, or not a safetensors file: it has {size} bytes, "
                f"and its header should have {length}."
            )
        raw += file.read(length)
        found = SourceFile.of(os.fspath(path), name)
    start = 8 + length
    header = load_json(raw[8:], f"{name}: the header")
    tensors = []
    try:
        metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
        for tensor, fields in header.items():
            dtype, shape = str(fields["dtype"]), tuple(fields["shape"])
            first, last = fields["data_offsets"]
            if not all(type(size) is int and size >= 0 for size in (first, last, *shape)):
                raise ValueError(f"{tensor!a} has the sizes {shape}, {first} and {last}")
            place = (math.prod(shape), name, start + first, start + last, found.path)
            tensors.append(TensorEntry(tensor, dtype, shape, *place))
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
    if start != found.size:
        raise CheckpointError(
            f"{name} has {found.size} bytes; expected {start}, where its tensors end. It is "
            "truncated, or not complete."
        )
    return replace(found, tensors=tuple(tensors), metadata=metadata, header_crc=zlib.crc32(raw))


def make_header(
    tensors: Mapping[str, tuple[str, Sequence[int], int]], metadata: Mapping[str, str]
) -> bytes:
    """The header of a file, with its length in front.

    Args:
        tensors: by name, in the order of the data: dtype, shape and number of bytes.
        metadata: texts.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file; raises CheckpointError if it cannot be read or is malformed."""
    with reading(path):
        raw = Path(path).read_bytes()
    return load_json(raw, str(path))


def load_json(raw: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object; raises CheckpointError if it is malformed.

    Args:
        raw: the JSON, in UTF-8.
        what: subject of the error message.
    """
    try:
        found = json.loads(raw)
    except (RecursionError, ValueError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} is malformed: it is not a JSON object.")
    return found
