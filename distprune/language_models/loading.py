"""Load a folder onto the ranks, each its own part; which tensors make which parameters.

[Note: pread] Bytes are read by ``preadv`` into the shard itself where rows are whole and the dtype
is that of the file, else through one buffer. Other ways to read a Llama of 1.1 GB on 2 ranks, whose
shards take 0.54 GB each (tests/benchmarks/results/loading_2cores_202611.txt):
``safe_open(...).get_slice`` of safetensors, and ``HuggingFaceStorageReader`` of
torch.distributed.checkpoint, which uses it. Both map the files, and the mapped pages count as the
memory of each rank: 0.32 to 0.39 GB on top of the shard, where this adds 0.02 GB. Neither knows the
conversions of transformers. Into shards whose memory exists already they take 0.1 to 0.4 s and 0.3
to 1.4 s from the page cache; ``load_sharded`` as a whole, with building the model and first
touching its memory, takes 0.8 to 3 s.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distprune._transformers.building import (
    build_without_weights,
    ignored_on_load,
    names_by_tensor,
    put_tensor,
    tensors_of_checkpoints,
)
from distprune._transformers.loading import MaskSource, SameTensor, TransformersRules
from distprune.base.float_formats import TORCH_NAMES
from distprune.base.pruned_form import is_dtensor, local_tensor
from distprune.files.checkpoints.checkpoint import Checkpoint, open_checkpoint
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.checkpoints.locating import locate
from distprune.files.disk.access import read_into
from distprune.files.errors import CheckpointError
from distprune.language_models.wrapping import Wrap, check_wrap, make_mesh, shard, sizes_of
from distprune.ranks.process_groups import world
from distprune.shards import dtensor
from distprune.shards.shard import FoldedShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedTokenizerBase


_NUM_SHOWN = 20


# All names of a parameter or persistent buffer, and what one of them is read from.
TensorSource = tuple[list[str], MaskSource]


def find_sources(
    model: Any, checkpoint: Checkpoint, *, ignore_unexpected: bool
) -> list[TensorSource]:
    """Find what each tensor of a model is read from, as ``from_pretrained`` does.

    Args:
        model: of transformers, on the meta device, not sharded. Tied parameters of which the
            checkpoint holds only one are left tied.
        checkpoint: its headers.
        ignore_unexpected: do not raise for tensors of the checkpoint that the model does not use.

    Raises:
        ValueError: with every missing, unexpected and wrongly shaped tensor.
    """
    tensors = dict(tensors_of_checkpoints(model))
    stored = {entry.name: entry.shape for entry in checkpoint.tensors}
    rules = TransformersRules(model)
    matching = rules.match(stored, {n: tuple(t.shape) for n, t in tensors.items()}, ())
    # As from_pretrained: saving undoes the conversions that were used.
    model._weight_conversions = rules.used()
    ignored = ignored_on_load(model)
    unexpected = {
        name: reason
        for name, reason in matching.unexpected.items()
        if not (ignored is not None and ignored.search(name))
    }
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
    if not ignore_unexpected:
        problems += [
            f"unexpected: {name}{f' ({reason})' if reason else ''}"
            for name, reason in unexpected.items()
        ]
    if problems:
        shown, more = "\n  ".join(problems[:_NUM_SHOWN]), len(problems) - _NUM_SHOWN
        rest = f"\n  and {more} more" if more > 0 else ""
        raise ValueError(
            f"{checkpoint.folder} does not fit {type(model).__name__}, the model of its "
            f"config.json:\n  {shown}{rest}\nExpected a complete checkpoint of this model. "
            "ignore_unexpected=True loads one that has other tensors besides."
        )
    return found


logger = logging.getLogger(__name__)


def load_sharded(
    folder: str | Path,
    *,
    wrap: Wrap = "none",
    mesh: DeviceMesh | Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    ignore_unexpected: bool = False,
) -> nn.Module:
    """Load the model of a Hugging Face folder, each rank only what it holds. Collective.

    The model is that of ``AutoModelForCausalLM.from_pretrained(folder)``, bit for bit, whatever the
    wrap: in eval mode, with tied weights, with the folder's generation config. It is built without
    weights, sharded, and every rank reads its rows and columns from the safetensors files; tensors
    that transformers moves on loading are converted one parameter at a time, and those of the
    experts that a rank has, one expert at a time.

    Args:
        folder: with config.json and safetensors files; or the name of a model in the local Hugging
            Face cache, as on the command line. Nothing is downloaded. Every rank reads it.
        wrap: "none", a whole model on every rank; "ddp"; "fsdp2", sharded by decoder layer, with
            the rest in the root; "tp", by transformers' tensor-parallel plan of the model;
            "fsdp2_tp", both.
        mesh: a DeviceMesh, or its sizes: by default all ranks. Two sizes for "fsdp2" are (replicas,
            shards), those for "fsdp2_tp" (data-parallel, tensor-parallel).
        dtype: of the parameters; by default that of the config, else of the first weights.
        device: of this rank; by default that of the mesh, or the current accelerator, or the CPU.
        ignore_unexpected: load a checkpoint that holds more than the model, as
            ``from_pretrained`` does with a warning.

    Returns:
        The model; a DistributedDataParallel for "ddp".

    Raises:
        ValueError: an argument is wrong; the ranks were given different ones or have different
            files; tensors are missing, unexpected, or of another shape: all of them, by name.
        NotImplementedError: the weights are quantised; transformers has no tensor-parallel plan for
            the model, one with a style that is not known here, or heads that the ranks cannot
            share; a conversion of transformers does more than move elements.
        CheckpointError: the folder does not exist or is damaged.
        ImportError: the extra ``language-models`` is not installed.

    Where one rank fails, every rank raises.

    Cost: memory: the shard, and one buffer of 16 MiB or, for parameters that a conversion makes,
    some copies of one expert, or of one whole parameter that is not a stack of experts, because it
    is converted before it is cut. From the disk: the bytes of the shard; of weights that are split
    by columns, and of converted ones but experts, each rank reads all rows. On the wire: a few
    hundred bytes; for "ddp", what it sends when it is made.
    """
    require_extra()
    communicator = world()
    started = time.monotonic()

    def build() -> tuple[Any, Checkpoint, list[TensorSource], torch.device]:
        check_wrap(wrap, mesh)
        checkpoint = open_checkpoint(folder)
        model = build_without_weights(checkpoint.folder, dtype or stored_dtype(checkpoint))
        untie_different(model, checkpoint)
        sources = find_sources(model, checkpoint, ignore_unexpected=ignore_unexpected)
        return model, checkpoint, sources, _device(device, mesh)

    model, checkpoint, sources, on = communicator.run(
        build,
        lambda built: [
            ("wrap", wrap),
            ("sizes of the mesh", str(sizes_of(mesh))),
            ("dtype", str(built[0].config.dtype)),
            ("config.json", built[0].config.to_json_string()),
            ("tensors of the files", _digest(built[1])),
        ],
    )
    device_mesh = make_mesh(wrap, mesh, on)
    communicator.run(lambda: shard(model, wrap, device_mesh))
    reader = PartReader(checkpoint)
    communicator.run(lambda: _fill(model, sources, reader, on))
    if communicator.index == 0:
        logger.info(
            "loaded %s (wrap=%s): this rank read %.1f MB in %.1f s",
            checkpoint.folder,
            wrap,
            reader.bytes_read / 1e6,
            time.monotonic() - started,
        )
    if wrap == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model).eval()
    return model  # type: ignore[no-any-return]


def _fill(
    model: Any, sources: Sequence[TensorSource], reader: PartReader, device: torch.device
) -> None:
    """Give every parameter and buffer of a sharded model its memory and its values."""
    tensors = dict(tensors_of_checkpoints(model))
    with torch.no_grad():
        for names, source in sources:
            tensor = tensors[names[0]]
            filled = torch.empty_like(tensor, device=device)
            read_part(source, _ranges(names[0], tensor), local_tensor(filled), reader)
            if isinstance(tensor, nn.Parameter):
                # FSDP2 knows the parameter object, and tied modules share it: it stays.
                new = nn.Parameter(filled, requires_grad=tensor.requires_grad)
                swap: Any = torch.utils.swap_tensors
                swap(tensor, new)
            else:
                for name in names:
                    put_tensor(model, name, filled)
    for name, buffer in list(model.named_buffers()):
        if buffer.device != device:
            put_tensor(model, name, buffer.to(device))
    left = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    assert not left, left


def read_part(source: MaskSource, ranges: Ranges, out: Tensor, reader: PartReader) -> None:
    """Read a part of a tensor of a model from where it is stored.

    Args:
        ranges: per dimension, the indices of the part: a run.
        out: gets the part.
    """
    if isinstance(source, SameTensor):
        reader.read(source.name, ranges, out)
        return

    def whole(name: str) -> Tensor:
        return reader.whole(name, out.dtype)

    if not source.conversion.is_stack:
        out.copy_(_part(source.read(whole), ranges))
        return
    # Experts, one by one.
    experts, *inner = ranges
    for place, expert in enumerate(experts):
        converted = source.read(whole, range(expert, expert + 1))
        out.narrow(0, place, 1).copy_(_part(converted, [range(1), *inner]))


def _part(whole: Tensor, ranges: Ranges) -> Tensor:
    for dim, part in enumerate(ranges):
        whole = whole.narrow(dim, part.start, len(part))
    return whole


def _ranges(name: str, tensor: Tensor) -> Ranges:
    """The indices, per dimension, of the elements that this rank holds."""
    if is_dtensor(tensor):
        shard = dtensor.local_shard(name, tensor, None)
        if isinstance(shard, FoldedShard):
            raise NotImplementedError(
                f"{name}: {shard.layout} gives the ranks parts of groups of rows; expected whole "
                "dimensions. Load such a model by from_pretrained(distributed_config=...)."
            )
        return shard.coordinates
    return [range(size) for size in tensor.shape]


def untie_different(model: Any, checkpoint: Checkpoint) -> None:
    """Untie parameters that the checkpoint stores with different values, as transformers does."""
    reader = PartReader(checkpoint)
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


def _device(
    device: torch.device | str | None, mesh: DeviceMesh | Sequence[int] | None
) -> torch.device:
    if device is not None:
        return torch.device(device)
    kind = getattr(mesh, "device_type", None)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or kind == "cpu":
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _digest(checkpoint: Checkpoint) -> str:
    facts = sorted((t.name, t.dtype, t.shape) for t in checkpoint.tensors)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


_BUFFER_BYTES = 16 * 2**20
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name)
    for name, torch_name in TORCH_NAMES.items()
    if hasattr(torch, torch_name)
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Ranges = Sequence[range]


class PartReader:
    """Reads parts of the tensors of a checkpoint.

    Args:
        checkpoint: its headers were read.

    Attributes:
        entries: the tensors, by name.
        bytes_read: so far.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._paths = {file.name: file.path for file in checkpoint.files}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.entries: dict[str, TensorEntry] = {t.name: t for t in checkpoint.tensors}
        self.bytes_read = 0

    def whole(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor as a whole, on the CPU, converted to a dtype."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=dtype)
        self.read(name, [range(size) for size in entry.shape], tensor)
        return tensor

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
        start = rows.start * row_bytes
        is_whole = all(len(part) == size for part, size in zip(inner, shape[1:], strict=True))
        if is_whole and out.is_contiguous() and out.dtype == dtype and out.device.type == "cpu":
            self._read_bytes(entry, start, out.view(-1).view(torch.uint8))
            return
        num_rows = min(max(_BUFFER_BYTES // row_bytes, 1), len(rows))
        if self._buffer.numel() < num_rows * row_bytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one is freed before
            self._buffer = torch.empty(num_rows * row_bytes, dtype=torch.uint8)
        for first in range(0, len(rows), num_rows):
            count = min(num_rows, len(rows) - first)
            raw = self._buffer[: count * row_bytes]
            self._read_bytes(entry, start + first * row_bytes, raw)
            part = _part(raw.view(dtype).view(count, *shape[1:]), [range(count), *inner])
            out.narrow(0, first, count).copy_(part)

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


def load_tokenizer(folder: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder, or of a model in the local cache; no downloads.

    Raises:
        CheckpointError: there is none, or it cannot be read.
        ImportError: the extra ``language-models`` is not installed.
    """
    require_extra()
    from transformers import AutoTokenizer

    place = locate(Path(folder)).folder
    try:
        made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        text = str(error).strip().splitlines()
        raise CheckpointError(
            f"{folder} has no tokenizer that transformers can load ({text[0] if text else error!r})"
            "; expected tokenizer.json or the like. Give the folder of one that has."
        ) from error
    return made


_PACKAGES = ("transformers", "safetensors")


def require_extra() -> None:
    """Raise ImportError, which names the extra, if a package of it is not installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"distprune.language_models needs {' and '.join(missing)}; expected the extra "
            "language-models. Install it: pip install 'distprune[language-models]'"
        )
