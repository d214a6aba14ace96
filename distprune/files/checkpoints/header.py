"""Headers of safetensors files, read strictly: any malformed file raises CheckpointError.

[Note: header] A file is the length n of the header (8 bytes, little-endian), the header, and data::

    | n |{"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "b": ...}|aaaaaa|bbb...|
    0   8                                                                         8 + n

The byte ranges must cover the data exactly, without overlap. Nothing is allocated before n is
compared with the size of the file. A duplicate key is an error: programs would differ in which of
the two values they use.

The ``safetensors`` package does not serve here: it accepts duplicate keys, refuses dtypes that are
merely copied, and maps the data, which can end in SIGBUS.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from distprune.base.float_formats import FLOATS, NOT_FLOATS
from distprune.files.errors import CheckpointError

# Bits per element. Tensors of other dtypes are copied as opaque bytes.
DTYPE_BITS = {name: num_bits for name, (_, num_bits) in NOT_FLOATS.items()} | {
    form.name: form.num_bits for form in FLOATS.values()
}
INDEX_SUFFIX = ".safetensors.index.json"  # of the file that maps tensors to files
_MAX_SIZE = 2**63 - 1


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
        CheckpointError: the file cannot be read, or is malformed.

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
    path = os.path.realpath(path)
    metadata, tensors = _parse(raw[8:], info.st_size - 8 - length, name, path)
    return WeightFile(
        name=name,
        path=path,
        size=info.st_size,
        mtime_ns=info.st_mtime_ns,
        data_start=8 + length,
        header_crc=zlib.crc32(raw),
        metadata=metadata,
        tensors=tensors,
        mode=info.st_mode & 0o777,
    )


def _parse(
    raw: bytes, data_size: int, name: str, path: str
) -> tuple[dict[str, str], tuple[TensorEntry, ...]]:
    """The metadata and the tensors of a header, in the order of the data.

    Args:
        raw: the JSON, with its padding.
        data_size: bytes after the header.
        name: the name of the file, for messages.
        path: of the file.
    """
    header = load_json(raw, f"{name}: the header")
    if not isinstance(header, dict):
        raise CheckpointError(f"{name}: the header is not a JSON object.")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(t, str) for t in metadata.values()):
        raise CheckpointError(f"{name}: __metadata__ is not a map from strings to strings.")
    end = 8 + len(raw)
    entries = []
    for tensor, fields in header.items():
        try:
            entries.append(_read_entry(tensor, fields, data_size, name, path, end))
        except ValueError as error:
            raise CheckpointError(f"{name}: tensor {_short(tensor)} {error}.") from None
    entries.sort(key=attrgetter("start", "stop"))
    for entry in entries:
        if entry.start != end:
            raise CheckpointError(
                f"{name}: tensor {_short(entry.name)} begins at byte {entry.start}; expected "
                f"{end}, where the previous one ends."
            )
        end = entry.stop
    if end != 8 + len(raw) + data_size:
        raise CheckpointError(
            f"{name} has {8 + len(raw) + data_size} bytes; expected {end}, where its tensors end."
        )
    return metadata, tuple(entries)


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


def _read_entry(
    tensor: str, fields: Any, data_size: int, file: str, path: str, data_start: int
) -> TensorEntry:
    """Check one tensor of a header; raises ValueError with the end of a sentence."""
    try:
        tensor.encode()
        dtype, shape, (start, stop) = fields["dtype"], fields["shape"], fields["data_offsets"]
        are_valid = isinstance(dtype, str) and are_sizes(shape) and are_sizes([start, stop])
    except (KeyError, TypeError, ValueError):
        are_valid = False
    if not are_valid:
        raise ValueError(
            f"is {_short(fields)}; expected a name in Unicode, a dtype, a shape, and two "
            "data_offsets"
        )
    if not start <= stop <= data_size:
        raise ValueError(
            f"claims the bytes {start} to {stop} of {data_size} bytes of data: the file is "
            "truncated, or the header is wrong"
        )
    numel, bits = math.prod(shape), DTYPE_BITS.get(dtype)
    if bits is not None and numel * bits != 8 * (stop - start):
        raise ValueError(
            f"is {dtype} of shape {_short(shape)}, which needs {numel * bits} bits, but has "
            f"{stop - start} bytes"
        )
    begin, end = data_start + start, data_start + stop
    return TensorEntry(tensor, dtype, tuple(shape), numel, file, begin, end, path)


def are_sizes(value: object) -> bool:
    """Whether a value of JSON is a list of sizes."""
    if not isinstance(value, list):
        return False
    # In place of a call for each: there may be hundreds of thousands.
    for size in value:  # noqa: SIM110
        if type(size) is not int or not 0 <= size <= _MAX_SIZE:
            return False
    return True


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 100 else text[:97] + "..."


def load_json(raw: bytes | str, what: str) -> Any:
    """Parse JSON without duplicate keys, in which programs would take different values.

    Args:
        raw: the JSON, in UTF-8.
        what: subject of the error message.

    Raises:
        CheckpointError: it is malformed.
    """
    try:
        text = raw if isinstance(raw, str) else raw.decode()
        return json.loads(text, object_pairs_hook=_unique)
    except (RecursionError, ValueError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}.") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        duplicate = next(key for key, _ in pairs if counts[key] > 1)
        raise ValueError(f"the key {ascii(duplicate)[:100]} occurs twice")
    return mapping
