"""Headers of safetensors files.

[Note: header] A file is the length n of the header (8 bytes, little-endian), the header, and data::

    | n |{"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "b": ...}|aaaaaa|bbb...|
    0   8                                                                         8 + n

The byte ranges of the tensors must cover the data exactly, without overlap. The ``safetensors``
package refuses dtypes that are merely copied, and maps the data, which can end in SIGBUS.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from distprune.base.float_formats import DTYPE_BITS
from distprune.files.errors import CheckpointError

INDEX_SUFFIX = ".safetensors.index.json"  # of the file that maps tensors to files


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
        data_start: the first byte after the header.
        header_crc: crc32 of all bytes before ``data_start``.
        metadata: the header's ``__metadata__``.
        tensors: in the order of the data.
        mode: permissions; a copy gets them, less the umask.
    """

    name: str
    path: str
    size: int
    mtime_ns: int
    data_start: int
    header_crc: int
    metadata: dict[str, str]
    tensors: tuple[TensorEntry, ...]
    mode: int = 0o666


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
    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= info.st_size - 8:
                raise CheckpointError(
                    f"{name} is truncated, or not a safetensors file: it has {info.st_size} bytes, "
                    f"and its header should have {length}."
                )
            file.seek(0)
            raw = file.read(8 + length)
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}.") from error
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
    return WeightFile(
        name=name,
        path=path,
        size=info.st_size,
        mtime_ns=info.st_mtime_ns,
        data_start=8 + length,
        header_crc=zlib.crc32(raw),
        metadata=metadata,
        tensors=tuple(tensors),
        mode=info.st_mode & 0o777,
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
