"""Load a folder onto the ranks, each its own part; which tensors make which parameters."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

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
from distprune.language_models.layers import require_extra
from distprune.language_models.part_reading import PartReader, Ranges, dtype_of
from distprune.language_models.wrapping import Wrap, check_wrap, make_mesh, shard, sizes_of
from distprune.shards import dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

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
