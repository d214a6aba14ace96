"""Headers of safetensors files, read strictly: any malformed file raises CheckpointError.

[Note: header] A file is the length n of the header (8 bytes, little-endian), the header, and data::

    | n |{"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "b": ...}|aaaaaa|bbb...|
    0   8                                                                         8 + n

The byte ranges must cover the data exactly, without overlap. Nothing is allocated before n is
compared with the size of the file. A duplicate key is an error: programs would differ in which of
the two values they use.

The ``safetensors`` package does not serve here: it accepts duplicate keys, refuses dtypes that are
merely copied, reports one problem at a time, and maps the data, which can end in SIGBUS.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from distprune._common.float_formats import FLOATS, NOT_FLOATS
from distprune.files.errors import CheckpointError

# Bits per element. Tensors of other dtypes are copied as opaque bytes.
DTYPE_BITS = {name: num_bits for name, (_, num_bits) in NOT_FLOATS.items()} | {
    form.name: form.num_bits for form in FLOATS.values()
}
INDEX_SUFFIX = ".safetensors.index.json"  # of the file that maps tensors to files
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MAX_NUMEL = 2**63 - 1
_MAX_PROBLEMS = 20  # of one file


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
        CheckpointError: with all problems.

    Cost: two reads, and memory in proportion to the header; the data is not read.
    """
    name = os.path.basename(path) if name is None else name
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            _fail(name, "is not a regular file.")
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
            length = _header_length(name, head, info.st_size)
            file.seek(0)
            raw = file.read(8 + length)
    except OSError as error:
        _fail(name, f"cannot be read: {error.strerror or error}.")
    if len(raw) != 8 + length:
        _fail(name, f"ends after {len(raw)} bytes, inside its header; expected {8 + length}.")
    path = os.path.realpath(path)
    metadata, tensors = parse_header(raw[8:], info.st_size - 8 - length, name, path)
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


def parse_header(
    raw: bytes, data_size: int, name: str = "the file", path: str = ""
) -> tuple[dict[str, str], tuple[TensorEntry, ...]]:
    """Check the JSON of a header against the size of the data that follows it.

    Args:
        raw: the JSON, with its padding.
        data_size: bytes after the header.
        name: the name of the file, for messages.
        path: of the file.

    Returns:
        The metadata, and the tensors in the order of the data; byte ranges count from the
        beginning of the file.

    Raises:
        CheckpointError: with all problems.
    """
    header = load_json(raw, f"{name}: the header")
    if not isinstance(header, dict) or raw[:1] != b"{":
        _fail(name, "the header is not a JSON object.")
    problems: list[str] = []
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(t, str) for t in metadata.values()):
        problems.append(f"{name}: __metadata__ is not a map from strings to strings.")
        metadata = {}
    entries = []
    for tensor, fields in header.items():
        try:
            entries.append(_read_entry(tensor, fields, data_size, name, path, 8 + len(raw)))
        except ValueError as error:
            problems.append(f"{name}: tensor {_short(tensor)} {error}.")
            if len(problems) == _MAX_PROBLEMS:
                problems.append(f"{name}: there may be more problems.")
                break
    entries.sort(key=attrgetter("start", "stop"))
    if not problems:
        problems += _coverage_problems(entries, data_size, name, 8 + len(raw))
    if problems:
        raise CheckpointError(f"{name} is not a valid safetensors file:", problems)
    return metadata, tuple(entries)


def make_header(
    tensors: Mapping[str, tuple[str, Sequence[int], int]],
    metadata: Mapping[str, str],
    *,
    is_ascii: bool = True,
) -> tuple[bytes, dict[str, int]]:
    """The header of a file, with its length in front; and by tensor, where it begins in the file.

    Args:
        tensors: by name, in the order of the data: dtype, shape and number of bytes.
        metadata: texts.
        is_ascii: whether other characters are escaped, which the safetensors library does not do.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    offsets, end = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        offsets[name] = end
        end += size
    raw = json.dumps(header, ensure_ascii=is_ascii, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    start = 8 + len(raw)
    return len(raw).to_bytes(8, "little") + raw, {name: start + n for name, n in offsets.items()}


def _header_length(name: str, head: bytes, size: int) -> int:
    check_no_pointer(head, name)
    if size == 0:
        _fail(name, "is empty; download it again.")
    if len(head) < 8:
        _fail(name, f"has {size} bytes; expected at least the 8 bytes of a header length.")
    length = int.from_bytes(head[:8], "little")
    if length > size - 8:
        _fail(
            name,
            f"claims a header of {length} bytes, but {size - 8} bytes follow: it is truncated, or "
            "not a safetensors file. Download it again?",
        )
    if length > MAX_HEADER_BYTES:
        _fail(name, f"has a header of {length} bytes; expected at most {MAX_HEADER_BYTES}.")
    return length


def _read_entry(
    tensor: str, fields: Any, data_size: int, file: str, path: str, data_start: int
) -> TensorEntry:
    """Check one tensor of a header; raises ValueError with the end of a sentence."""
    if not tensor.isascii():
        try:
            tensor.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("has a name that is not valid Unicode") from None
    try:
        dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    except (KeyError, TypeError):  # it may be no mapping
        raise ValueError("lacks one of dtype, shape and data_offsets") from None
    if not isinstance(dtype, str):
        raise ValueError("has a dtype that is not a string")
    if not are_sizes(shape):
        raise ValueError("has a shape that is not a list of sizes")
    if not are_sizes(offsets) or len(offsets) != 2:
        raise ValueError("has data_offsets that are not two sizes")
    start, stop = offsets
    if not start <= stop <= data_size:
        raise ValueError(
            f"claims the bytes {start} to {stop} of {data_size} bytes of data: the file is "
            "truncated, or the header is wrong"
        )
    numel = 1
    for size in shape:
        numel *= size
        if numel > _MAX_NUMEL:
            raise ValueError("has more than 2**63 - 1 elements")
    bits = DTYPE_BITS.get(dtype)
    if bits is not None and numel * bits != 8 * (stop - start):
        raise ValueError(
            f"is {dtype} of shape {_short(shape)}, which needs {numel * bits / 8:g} bytes, but has "
            f"{stop - start}"
        )
    begin, end = data_start + start, data_start + stop
    return TensorEntry(tensor, dtype, tuple(shape), numel, file, begin, end, path)


def _coverage_problems(
    entries: list[TensorEntry], data_size: int, name: str, data_start: int
) -> list[str]:
    """Overlaps of sorted entries, and holes between them."""
    end = data_start
    for number, entry in enumerate(entries):
        if entry.start != end:
            what = "overlaps with" if entry.start < end else "leaves a hole after"
            previous = f"tensor {_short(entries[number - 1].name)}" if number else "the header"
            return [
                f"{name}: tensor {_short(entry.name)} {what} {previous}: it begins at byte "
                f"{entry.start}, and the previous one ends at {end}."
            ]
        end = entry.stop
    if end != data_start + data_size:
        return [
            f"{name}: has {data_start + data_size} bytes, but its tensors end at byte {end}; "
            "expected no bytes after them. Download it again?"
        ]
    return []


def are_sizes(value: object) -> bool:
    """Whether a value of JSON is a list of sizes."""
    if not isinstance(value, list):
        return False
    # In place of a call for each: there may be hundreds of thousands.
    for size in value:  # noqa: SIM110
        if type(size) is not int or not 0 <= size <= _MAX_NUMEL:
            return False
    return True


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _fail(name: str, text: str) -> NoReturn:
    raise CheckpointError(f"{name} {text}")


_START = b"version https://git-lfs"
HEAD_BYTES = len(_START)


def check_no_pointer(head: bytes, name: str) -> None:
    """Raise CheckpointError if a file is a git-lfs pointer.

    Args:
        head: the first ``HEAD_BYTES`` bytes of the file, or more.
        name: the name of the file, for the message.
    """
    if head.startswith(_START):
        raise CheckpointError(
            f"{name} is a git-lfs pointer, not the file itself; run `git lfs pull` in its folder."
        )


def load_json(raw: bytes | str, what: str) -> Any:
    """Parse JSON strictly: UTF-8, no duplicate keys, no NaN.

    Programs differ in how they read malformed JSON.

    Args:
        raw: the JSON.
        what: subject of the error message.

    Raises:
        CheckpointError: it is malformed.
    """
    if isinstance(raw, str):  # lone surrogates become invalid UTF-8
        raw = raw.encode("utf-8", "surrogatepass")
    try:
        return json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
        )
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:  # from UTF-8, the JSON decoder, or one of the hooks
        reason = str(error)
    raise CheckpointError(f"{what} is not valid JSON: {reason}. Download the file again?")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        duplicate = next(key for key, _ in pairs if counts[key] > 1)
        raise ValueError(f"the key {ascii(duplicate)[:100]} occurs twice")
    return mapping


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
