"""The safetensors files of a model, in full size from the start and filled piece by piece."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from distprune._transformers.saving import SavedMasks
from distprune.files.disk.access import write_atomically
from distprune.files.disk.open_files import OpenFiles, allocate, write_from
from distprune.files.formats.header import INDEX_SUFFIX
from distprune.language_models.part_reading import DTYPES

_STEM = "model"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _Place:
    """Where a tensor is written.

    Attributes:
        file: its name.
        offset: of its first byte in the file.
        dtype: of the tensor.
    """

    file: str
    offset: int
    dtype: torch.dtype


class WeightFiles:
    """The weight files of a model under way.

    Args:
        saved: what is written of which parameters; SavedMasks converts any tensors.
        shapes, dtypes: of the parameters.
        max_bytes: of tensors in one file; a larger tensor has a file of its own.

    Attributes:
        num_bytes: of all tensors.
        sizes: of the files, by name.
        zeros: zeros written so far, by parameter.
    """

    def __init__(
        self,
        saved: Sequence[SavedMasks],
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        max_bytes: int,
    ) -> None:
        self._saved_of = {name: item for item in saved for name in item.parameters}
        self._shapes, self._dtypes = shapes, dtypes
        tensors = {
            name: (shape, dtypes[item.parameters[0]])
            for item in saved
            for name, shape in item.tensors.items()
        }
        self._headers, self._places, self.sizes = _lay_out(tensors, max_bytes)
        self.num_bytes = sum(math.prod(s) * d.itemsize for s, d in tensors.values())
        self.zeros = dict.fromkeys(shapes, 0)
        self._numel = sum(math.prod(shape) for shape, _ in tensors.values())
        self._waiting: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}
        self._folder = Path()
        self._files = OpenFiles(os.O_RDWR)

    def start(self, folder: Path) -> None:
        """Reserve the disk for all files, and write their headers and the index."""
        self._folder = folder
        for file, header in self._headers.items():
            allocate(str(folder / file), self.sizes[file])
            write_from(self._files, str(folder / file), 0, header)
        if len(self.sizes) > 1:
            index = {
                "metadata": {"total_parameters": self._numel, "total_size": self.num_bytes},
                "weight_map": {name: self._places[name].file for name in sorted(self._places)},
            }
            text = json.dumps(index, indent=2) + "\n"
            write_atomically(folder / f"{_STEM}{INDEX_SUFFIX}", text.encode())

    def add(self, parameter: str, start: int, values: Tensor) -> None:
        """Write a piece of a parameter.

        Args:
            parameter: its name.
            start: the number of the first element, row-major.
            values: 1-d, contiguous, on the CPU.

        Raises:
            OutputError: the disk is full, or reports an error.
        """
        self.zeros[parameter] += values.numel() - int(torch.count_nonzero(values))
        saved = self._saved_of[parameter]
        if saved.conversion is None:
            (name,) = saved.tensors
            self._write(name, start, values)
            return
        if parameter not in self._waiting:
            shape = self._shapes[parameter]
            self._waiting[parameter] = torch.empty(shape, dtype=values.dtype)
            self._missing[parameter] = math.prod(shape)
        self._waiting[parameter].view(-1)[start : start + values.numel()] = values
        self._missing[parameter] -= values.numel()
        if all(self._missing.get(name) == 0 for name in saved.parameters):
            made = saved.make({name: self._waiting.pop(name) for name in saved.parameters})
            for name in saved.tensors:
                self._write(name, 0, made.pop(name).reshape(-1))

    def finish(self) -> None:
        """Wait until everything is on the disk."""
        assert not self._waiting
        self._files.sync()

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _write(self, name: str, start: int, values: Tensor) -> None:
        place = self._places[name]
        assert values.dtype == place.dtype, (name, values.dtype)
        data = values.contiguous().view(torch.uint8).numpy().data
        offset = place.offset + start * place.dtype.itemsize
        write_from(self._files, str(self._folder / place.file), offset, data)


def parse_size(size: int | str) -> int:
    """A number of bytes: 5_000_000_000, "5GB" or "512MiB".

    Raises:
        ValueError: it is none, or not positive.
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    units |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
    try:
        if isinstance(size, str):
            text = size.strip().upper()
            unit = next((unit for unit in units if text.endswith(unit)), "")
            num_bytes = int(float(text.removesuffix(unit)) * units.get(unit, 1))
        else:
            num_bytes = int(size)
    except ValueError:
        num_bytes = 0
    if num_bytes <= 0:
        raise ValueError(
            f"max_shard_size={size!r}; expected a number of bytes, or a text such as '5GB'."
        )
    return num_bytes


def _lay_out(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], max_bytes: int
) -> tuple[dict[str, bytes], dict[str, _Place], dict[str, int]]:
    """Headers by file, the place of every tensor, and sizes by file; as transformers names them."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, (shape, dtype) in tensors.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and size + num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    headers: dict[str, bytes] = {}
    places: dict[str, _Place] = {}
    sizes: dict[str, int] = {}
    for number, names in enumerate(groups, 1):
        suffix = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        file = f"{_STEM}{suffix}.safetensors"
        # Wide dtypes first, as in the safetensors library, so that all elements are aligned.
        names = sorted(names, key=lambda name: -tensors[name][1].itemsize)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        starts = {}
        for name in names:
            shape, dtype = tensors[name]
            starts[name], end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [starts[name], end],
            }
        raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        headers[file] = len(raw).to_bytes(8, "little") + raw
        data = len(headers[file])
        sizes[file] = data + end
        places |= {name: _Place(file, data + starts[name], tensors[name][1]) for name in names}
    return headers, places, sizes
