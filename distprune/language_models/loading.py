"""Load a folder onto the ranks, each its own part; which tensors make which parameters.

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

import hashlib
import importlib.util
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distprune._common.float_formats import FLOATS
from distprune._common.process_groups import world
from distprune._common.pruned_form import is_dtensor, local_tensor
from distprune._transformers.building import (
    build_without_weights,
    ignored_on_load,
    tensors_of_checkpoints,
)
from distprune._transformers.mask_matching import MaskSource, SameTensor
from distprune._transformers.names import Converted, TransformersRules
from distprune.files.checkpoints.checkpoint import Checkpoint, open_checkpoint
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.checkpoints.locating import locate
from distprune.files.errors import CheckpointError
from distprune.language_models.wrapping import Wrap, check_wrap, make_mesh, shard, sizes_of
from distprune.shards import dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedTokenizerBase


_NUM_SHOWN = 20


@dataclass(frozen=True)
class TensorSource:
    """A parameter or persistent buffer, and the tensors that it is read from.

    Attributes:
        names: all its names in the model.
        source: of one of them.
    """

    names: tuple[str, ...]
    source: MaskSource


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
    for names in _by_tensor(tensors):
        sources = [matching.sources[name] for name in names if name in matching.sources]
        if sources:
            found.append(TensorSource(tuple(names), sources[0]))
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
        raise ValueError(_text(model, checkpoint, problems))
    return found


def doubly_stored(model: Any, checkpoint: Checkpoint) -> list[tuple[str, list[str]]]:
    """Tied parameters of which the checkpoint holds a tensor under more than one name."""
    stored = {entry.name for entry in checkpoint.tensors}
    groups = _by_tensor(dict(tensors_of_checkpoints(model)))
    present = [[name for name in names if name in stored] for names in groups]
    return [(names[0], names[1:]) for names in present if len(names) > 1]


def _by_tensor(tensors: dict[str, Tensor]) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _text(model: Any, checkpoint: Checkpoint, problems: list[str]) -> str:
    shown = "\n  ".join(problems[:_NUM_SHOWN])
    more = len(problems) - _NUM_SHOWN
    rest = f"\n  and {more} more" if more > 0 else ""
    return (
        f"{checkpoint.folder} does not fit {type(model).__name__}, the model of its config.json:"
        f"\n  {shown}{rest}\nExpected a complete checkpoint of this model. "
        "ignore_unexpected=True loads one that has other tensors besides."
    )


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
        checkpoint = open_checkpoint(folder, follow_links=True)
        model = build_without_weights(checkpoint.folder, dtype or _dtype_of(checkpoint))
        _untie_different(model, checkpoint)
        sources = find_sources(model, checkpoint, ignore_unexpected=ignore_unexpected)
        return model, checkpoint, sources, _device(device, mesh)

    def facts(
        built: tuple[Any, Checkpoint, list[TensorSource], torch.device],
    ) -> list[tuple[str, str]]:
        model, checkpoint = built[:2]
        return [
            ("wrap", wrap),
            ("sizes of the mesh", str(sizes_of(mesh))),
            ("dtype", str(model.config.dtype)),
            ("config.json", model.config.to_json_string()),
            ("tensors of the files", _digest(checkpoint)),
        ]

    model, checkpoint, sources, on = communicator.run(build, facts)
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
    with reader, torch.no_grad():
        for item in sources:
            name = item.names[0]
            tensor = tensors[name]
            filled = torch.empty_like(tensor, device=device)
            _read(item, _ranges(name, tensor), local_tensor(filled), reader)
            if isinstance(tensor, nn.Parameter):
                # FSDP2 knows the parameter object, and tied modules share it: it stays.
                new = nn.Parameter(filled, requires_grad=tensor.requires_grad)
                swap: Any = torch.utils.swap_tensors
                swap(tensor, new)
            else:
                for other in item.names:
                    _set_buffer(model, other, filled)
    for name, buffer in list(model.named_buffers()):
        if buffer.device != device:
            _set_buffer(model, name, buffer.to(device))
    left = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    assert not left, left


def _read(item: TensorSource, ranges: Ranges, out: Tensor, reader: PartReader) -> None:
    source = item.source
    if isinstance(source, SameTensor):
        reader.read(source.name, ranges, out)
        return

    def whole(name: str) -> Tensor:
        return reader.whole(name, out.dtype)

    if not (isinstance(source, Converted) and source.is_stack):
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
        return dtensor.local_shard(name, tensor, None).coordinates
    return [range(size) for size in tensor.shape]


def _untie_different(model: Any, checkpoint: Checkpoint) -> None:
    """Untie parameters that the checkpoint stores with different values, as transformers does."""
    reader = PartReader(checkpoint)
    with reader:
        for first, others in doubly_stored(model, checkpoint):
            for other in others:
                if not _equal(reader, first, other):
                    logger.warning(
                        "%s and %s are tied by the config, and differ in %s: they are not tied.",
                        first,
                        other,
                        checkpoint.folder,
                    )
                    path, _, leaf = other.rpartition(".")
                    tied = model.get_parameter(other)
                    setattr(model.get_submodule(path), leaf, nn.Parameter(torch.empty_like(tied)))
                    model.all_tied_weights_keys.pop(other, None)


def _equal(reader: PartReader, first: str, second: str) -> bool:
    """Whether two tensors of a checkpoint are equal; reads them row by row, in pieces."""
    one, two = reader.entries[first], reader.entries[second]
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    if not one.numel:
        return True
    dtype, rows = dtype_of(one), one.shape[0] if one.shape else 1
    step = max(2**24 // (one.nbytes // rows), 1)
    inner = [range(size) for size in one.shape[1:]]
    for start in range(0, rows, step):
        part = range(start, min(start + step, rows))
        shape = (len(part), *one.shape[1:]) if one.shape else ()
        pieces = [torch.empty(shape, dtype=dtype) for _ in range(2)]
        for name, piece in zip((first, second), pieces, strict=True):
            reader.read(name, [part, *inner] if one.shape else [], piece)
        if not torch.equal(*(piece.view(torch.uint8) for piece in pieces)):
            return False
    return True


def _set_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, value)


def _dtype_of(checkpoint: Checkpoint) -> torch.dtype | None:
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
