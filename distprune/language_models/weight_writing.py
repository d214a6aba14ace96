"""The safetensors files of a model, in full size from the start and filled piece by piece.

A sharded parameter is gathered whole on the first rank, in pieces of some megabytes.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from distprune._common.collectives import Communicator
from distprune._common.pruned_form import masked_product
from distprune._transformers.saving import SavedMasks
from distprune.files.checkpoints.header import INDEX_SUFFIX
from distprune.files.disk.access import OpenFiles, allocate, write_atomically, write_from
from distprune.language_models.part_reading import DTYPES
from distprune.shards.shard import FlatShard, LocalShard

_PIECE_BYTES = 8 * 2**20
# What the first rank does with a piece: the number of its first element, and its values, 1-d.
UsePiece = Callable[[int, Tensor], None]


class Gathering:
    """Hands the pieces of parameters to the first rank, which uses one while the next one comes.

    Args:
        communicator: the ranks; the first one gets the pieces.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._waiting: list[Callable[[], None]] = []

    def gather(self, shard: LocalShard, use: UsePiece) -> None:
        """Gather a parameter with zeros where it is pruned; collective.

        ``use`` is called on the first rank, at the latest by :meth:`finish`: row-major, in order.

        Raises:
            Exception: what ``use`` raised for an earlier piece, on every rank.

        Cost: an all-reduce of the parameter's bytes, 8 MB (or one index of dimension 0) at a time;
            nothing if every rank has the whole.
        """
        if _is_whole(shard):
            if self._communicator.index == 0:
                self._waiting += [_later(use, shard, rows) for rows in _pieces(shard)]
            return
        for rows in _pieces(shard):
            num_bytes = len(rows) * _row_bytes(shard)
            step = functools.partial(self._part, shard, rows)
            words = self._communicator.reduce(-(-num_bytes // 8), step)
            if self._communicator.index == 0:
                values = words.view(torch.uint8)[:num_bytes].view(shard.values.dtype)
                self._waiting.append(_later_with(use, rows.start * _row_numel(shard), values))

    def finish(self) -> None:
        """Use the last pieces; collective.

        Raises:
            Exception: as :meth:`gather`.
        """
        self._communicator.run(self._use_waiting)

    def _use_waiting(self) -> None:
        for step in self._waiting:
            step()
        self._waiting.clear()

    def _part(self, shard: LocalShard, rows: range) -> Tensor:
        """This rank's elements of a piece, the others zero, as int64 words: a local step."""
        self._use_waiting()
        num_bytes = len(rows) * _row_bytes(shard)
        words = torch.zeros(-(-num_bytes // 8), dtype=torch.int64)
        if shard.replica == 0 and shard.values.numel():
            piece = words.view(torch.uint8)[:num_bytes].view(shard.values.dtype)
            if isinstance(shard, FlatShard):
                _write_run(shard, rows.start * _row_numel(shard), piece)
            else:
                _write_block(shard, rows, piece.view(len(rows), *shard.shape[1:]))
        return words


def _later(use: UsePiece, shard: LocalShard, rows: range) -> Callable[[], None]:
    def step() -> None:
        if isinstance(shard, FlatShard):
            piece = torch.empty(len(rows) * _row_numel(shard), dtype=shard.values.dtype)
            _write_run(shard, rows.start * _row_numel(shard), piece)
        else:
            part = slice(rows.start, rows.stop) if shard.shape else ...
            mask = None if shard.mask is None else shard.mask[part]
            piece = _masked(shard.values[part], mask).cpu().reshape(-1)
        use(rows.start * _row_numel(shard), piece)

    return step


def _later_with(use: UsePiece, start: int, values: Tensor) -> Callable[[], None]:
    return lambda: use(start, values)


def _is_whole(shard: LocalShard) -> bool:
    """Whether every rank has the whole; a fact that all ranks share.

    Not a matter of ``ranks``: under FSDP2 over tensor parallelism a norm is spread over each row of
    the mesh, so that the ranks of a shard differ.
    """
    if shard.ranks is None:
        return True
    return shard.placements is not None and all(p.is_replicate() for p in shard.placements)


def _pieces(shard: LocalShard) -> Iterator[range]:
    """Ranges of dimension 0."""
    if not shard.numel:
        return
    num_rows = shard.shape[0] if shard.shape else 1
    step = max(_PIECE_BYTES // _row_bytes(shard), 1)
    for start in range(0, num_rows, step):
        yield range(start, min(start + step, num_rows))


def _row_numel(shard: LocalShard) -> int:
    return math.prod(shard.shape[1:])


def _row_bytes(shard: LocalShard) -> int:
    return _row_numel(shard) * shard.values.itemsize


def _write_block(shard: LocalShard, rows: range, piece: Tensor) -> None:
    """Write this rank's part of some rows into a whole piece."""
    own, *inner = shard.coordinates
    first, last = max(rows.start, own.start), min(rows.stop, own.stop)
    if first >= last:
        return
    part = slice(first - own.start, last - own.start)
    mask = None if shard.mask is None else shard.mask[part]
    target = piece[first - rows.start : last - rows.start]
    for dim, columns in enumerate(inner, 1):
        target = target.narrow(dim, columns.start, len(columns))
    target.copy_(_masked(shard.values[part], mask))


def _write_run(shard: FlatShard, start: int, piece: Tensor) -> None:
    """Write this rank's run of elements into a whole piece, 1-d, that begins at ``start``."""
    stop = start + piece.numel()
    if shard.index.start is not None:
        own = shard.index.start
        first, last = max(start, own), min(stop, own + shard.values.numel())
        if first < last:
            part = slice(first - own, last - own)
            mask = None if shard.mask is None else shard.mask[part]
            piece[first - start : last - start] = _masked(shard.values[part], mask)
        return
    # Not row-major in memory: channels_last, say.
    indices = shard.index(torch.arange(shard.values.numel()))
    inside = (indices >= start) & (indices < stop)
    values = _masked(shard.values, shard.mask).cpu()
    piece[indices[inside] - start] = values[inside]


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """What ``remove`` would leave: pruned elements are +0."""
    if mask is None:
        return values
    return masked_product(values, mask).masked_fill(mask == 0, 0)


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
