"""Read parts of tensors from safetensors files, straight into the memory of their shards.

[Note: pread] Bytes are read by ``preadv`` into the shard itself where rows are whole and the dtype
is that of the file, else through one buffer. Other ways to read a Llama of 1.1 GB on 2 ranks, whose
shards take 0.54 GB each (tests/benchmarks, part "loading"): ``safe_open(...).get_slice`` of
safetensors, and ``HuggingFaceStorageReader`` of torch.distributed.checkpoint, which uses it. Both
map the files, and the mapped pages count as the memory of each rank: 0.32 to 0.39 GB on top of the
shard, where this adds 0.02 GB. Neither knows the conversions of transformers. Into shards whose
memory exists already they take 0.1 to 0.4 s and 0.3 to 1.4 s from the page cache; ``load_sharded``
as a whole, with building the model and first touching its memory, takes 0.8 to 3 s.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from distprune._common.float_formats import FLOATS
from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.errors import CheckpointError

_BUFFER_BYTES = 16 * 2**20
_READ_BYTES = 2**30  # Linux reads at most 2 GiB in one call
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "C64": torch.complex64,
    **{f.name: getattr(torch, f.torch_name) for f in FLOATS.values()
       if f.torch_name and hasattr(torch, f.torch_name)},
}  # fmt: skip

Ranges = Sequence[range]


class PartReader:
    """Reads parts of the tensors of a checkpoint; a context manager that closes the files.

    Args:
        checkpoint: its headers were read.

    Attributes:
        entries: the tensors, by name.
        bytes_read: so far.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._paths = {file.name: file.path for file in checkpoint.files}
        self._open: dict[str, int] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.entries: dict[str, TensorEntry] = {t.name: t for t in checkpoint.tensors}
        self.bytes_read = 0

    def __enter__(self) -> PartReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def whole(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor as a whole, on the CPU.

        Args:
            name: of the tensor.
            dtype: of the result.
        """
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=dtype)
        self.read(name, [range(size) for size in entry.shape], tensor)
        return tensor

    def read(self, name: str, ranges: Ranges, out: Tensor) -> None:
        """Read a part of a tensor.

        Args:
            name: of the tensor.
            ranges: per dimension, the indices of the part: a run.
            out: gets the part; of its shape, on any device, in any dtype.

        Raises:
            CheckpointError: the file is gone, shorter than it was, or cannot be read.

        Cost: bytes of the rows that hold the part, and a buffer of 16 MiB, or one index of
        dimension 0 if that is more; no buffer if rows are whole and ``out`` is contiguous, on the
        CPU and in the dtype of the file.
        """
        entry = self.entries[name]
        if out.numel() == 0:
            return
        dtype = dtype_of(entry)
        shape = entry.shape or (1,)
        rows, *inner = ranges or [range(1)]
        out = out if entry.shape else out.view(1)
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        start = entry.start + rows.start * row_bytes
        is_whole = all(len(part) == size for part, size in zip(inner, shape[1:], strict=True))
        if is_whole and out.is_contiguous() and out.dtype == dtype and out.device.type == "cpu":
            self._read_bytes(entry, start, out.view(-1).view(torch.uint8))
            return
        num_rows = min(max(_BUFFER_BYTES // row_bytes, 1), len(rows))
        for first in range(0, len(rows), num_rows):
            count = min(num_rows, len(rows) - first)
            raw = self._scratch(count * row_bytes)
            self._read_bytes(entry, start + first * row_bytes, raw)
            part = raw.view(dtype).view(count, *shape[1:])
            for dim, columns in enumerate(inner, 1):
                part = part.narrow(dim, columns.start, len(columns))
            out.narrow(0, first, count).copy_(part)

    def _scratch(self, num_bytes: int) -> Tensor:
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one is freed before
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer[:num_bytes]

    def _read_bytes(self, entry: TensorEntry, start: int, out: Tensor) -> None:
        view = out.numpy().data
        done = 0
        try:
            descriptor = self._descriptor(entry.file)
            while done < len(view):
                count = os.preadv(descriptor, [view[done : done + _READ_BYTES]], start + done)
                if count == 0:
                    raise CheckpointError(
                        f"{entry.file} ends inside the tensor {entry.name}: it has become shorter "
                        "since its header was read."
                    )
                done += count
        except OSError as error:
            raise CheckpointError(
                f"{entry.file} cannot be read: {error.strerror or error}."
            ) from error
        self.bytes_read += done

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            self._open[file] = os.open(self._paths[file], os.O_RDONLY | os.O_CLOEXEC)
        return self._open[file]


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """The torch dtype of a tensor in a file.

    Raises:
        CheckpointError: torch has none.
    """
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise CheckpointError(
            f"{entry.name} has the dtype {entry.dtype}, which torch {torch.__version__} does not "
            f"have; expected one of {', '.join(DTYPES)}."
        )
    return dtype
