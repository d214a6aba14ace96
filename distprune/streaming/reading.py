"""Read tensors of a model from those of a checkpoint."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from distprune._transformers.building import names_by_tensor, put_tensor, tensors_of_checkpoints
from distprune._transformers.loading import MaskSource, SameTensor, TransformersRules
from distprune.base.float_formats import TORCH_NAMES
from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.disk.access import read_into
from distprune.files.errors import CheckpointError

logger = logging.getLogger(__name__)

_NUM_SHOWN = 20
# All names of a parameter or persistent buffer, and what one of them is read from.
TensorSource = tuple[list[str], MaskSource]


def find_sources(model: Any, checkpoint: Checkpoint) -> list[TensorSource]:
    """Find what each tensor of a model is read from, as ``from_pretrained`` does.

    Args:
        model: of transformers, on the meta device, not sharded. Tied parameters of which the
            checkpoint holds only one are left tied.
        checkpoint: its headers.

    Raises:
        ValueError: with every missing and wrongly shaped tensor.
    """
    tensors = dict(tensors_of_checkpoints(model))
    stored = {entry.name: entry.shape for entry in checkpoint.tensors}
    rules = TransformersRules(model)
    matching = rules.match(stored, {n: tuple(t.shape) for n, t in tensors.items()}, ())
    # As from_pretrained: saving undoes the conversions that were used.
    model._weight_conversions = rules.used()
    found: list[TensorSource] = []
    missing: list[str] = []
    for names in names_by_tensor(tensors.items()):
        sources = [matching.sources[name] for name in names if name in matching.sources]
        if sources:
            found.append((names, sources[0]))
        else:
            missing += names
    problems = [f"missing: {name}" for name in missing if name not in matching.mismatched]
    problems += [f"wrong shape: {reason}" for reason in matching.mismatched.values()]
    if problems:
        shown, more = "\n  ".join(problems[:_NUM_SHOWN]), len(problems) - _NUM_SHOWN
        rest = f"\n  and {more} more" if more > 0 else ""
        raise ValueError(
            f"{checkpoint.folder} does not fit {type(model).__name__}, the model of its "
            f"config.json:\n  {shown}{rest}\nExpected a complete checkpoint of this model."
        )
    return found


def untie_different(model: Any, checkpoint: Checkpoint) -> None:
    """Untie parameters that the checkpoint stores with different values, as transformers does."""
    reader = TensorReader(checkpoint)
    for names in names_by_tensor(tensors_of_checkpoints(model)):
        stored = [name for name in names if name in reader.entries]
        for other in stored[1:]:
            if reader.are_equal(stored[0], other):
                continue
            logger.warning(
                "%s and %s are tied by the config, and differ in %s: they are not tied.",
                stored[0],
                other,
                checkpoint.folder,
            )
            untied = nn.Parameter(torch.empty_like(model.get_parameter(other)))
            put_tensor(model, other, untied)
            model.all_tied_weights_keys.pop(other, None)


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """The dtype of the weights where the config does not say one."""
    if checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype"):
        return None
    dtypes = map(dtype_of, checkpoint.tensors)
    return next((dtype for dtype in dtypes if dtype.is_floating_point), None)


_BUFFER_BYTES = 16 * 2**20
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name)
    for name, torch_name in TORCH_NAMES.items()
    if hasattr(torch, torch_name)
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorReader:
    """Reads the tensors of a checkpoint.

    Args:
        checkpoint: its headers were read.

    Attributes:
        entries: the tensors, by name.
        bytes_read: so far.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._paths = {file.name: file.path for file in checkpoint.files}
        self.entries: dict[str, TensorEntry] = {t.name: t for t in checkpoint.tensors}
        self.bytes_read = 0

    def read_from(self, source: MaskSource, out: Tensor) -> None:
        """Read a tensor of a model from where it is stored; experts, one by one."""
        if isinstance(source, SameTensor):
            self.read(source.name, out)
            return

        def whole(name: str) -> Tensor:
            tensor = torch.empty(self.entries[name].shape, dtype=out.dtype)
            self.read(name, tensor)
            return tensor

        if not source.conversion.is_stack:
            out.copy_(source.read(whole))
            return
        for expert in range(len(out)):
            out[expert] = source.read(whole, range(expert, expert + 1))[0]

    def are_equal(self, first: str, second: str) -> bool:
        """Whether two tensors have the same shape, dtype and bytes; reads them in pieces."""
        one, two = self.entries[first], self.entries[second]
        if (one.shape, one.dtype) != (two.shape, two.dtype):
            return False
        for start in range(0, one.nbytes, _BUFFER_BYTES):
            size = min(_BUFFER_BYTES, one.nbytes - start)
            pieces = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
            for entry, piece in zip((one, two), pieces, strict=True):
                self._read_bytes(entry, start, piece)
            if not torch.equal(*pieces):
                return False
        return True

    def read(self, name: str, out: Tensor) -> None:
        """Read a whole tensor.

        Args:
            name: of the tensor.
            out: gets it; of its shape, contiguous, on any device, in any dtype.

        Raises:
            CheckpointError: the file is gone, shorter than it was, or cannot be read.

        Cost: a buffer of 16 MiB, unless ``out`` is on the CPU and in the dtype of the file.
        """
        entry = self.entries[name]
        dtype, flat = dtype_of(entry), out.view(-1)
        if out.dtype == dtype and out.device.type == "cpu":
            self._read_bytes(entry, 0, flat.view(torch.uint8))
            return
        num = _BUFFER_BYTES // dtype.itemsize
        buffer = torch.empty(min(num, out.numel()), dtype=dtype)
        for start in range(0, out.numel(), num):
            part = buffer[: min(num, out.numel() - start)]
            self._read_bytes(entry, start * dtype.itemsize, part.view(torch.uint8))
            flat[start : start + len(part)] = part

    def _read_bytes(self, entry: TensorEntry, start: int, out: Tensor) -> None:
        """Fill a tensor of bytes with those of a stored tensor, from its byte ``start`` on."""
        path = self._paths[entry.file]
        read_into(path, entry.start + start, out.numpy().data)
        self.bytes_read += out.numel()


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
