"""Checkpoints of pruned models: what torch.distributed.checkpoint (DCP) needs beside its own tools.

Masks are buffers of the model, DTensors where the parameters are, so DCP saves them, and
shards them anew, like any other tensor. Save with::

    state = checkpoint.get_state_dict(model, optimizer, pruner)
    dcp.save(state, checkpoint_id=path)

and go on from there, on any other sharding or on one process, with::

    checkpoint.load(path, model, optimizer, pruner)   # model: fresh, dense or pruned

[Note: async_save] ``dcp.async_save`` communicates from a thread while training goes on. On a
process group that anything else uses in the meantime, pruning included, their messages mix and
the job hangs. Give it one of its own, made once: ``process_group=dist.new_group(backend="gloo")``.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from distprune.collectives import attempt, world
from distprune.global_pruning import global_unstructured
from distprune.masking.hook import PruningHook, find_hook
from distprune.methods import Identity
from distprune.naming import NamedParameter, named_modules
from distprune.sharding import is_dtensor
from distprune.verification.records import put_records, records_of
from distprune.wrappers import managed_parameters

if TYPE_CHECKING:  # importing DCP and DTensor costs more than all the rest
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint import StorageReader
    from torch.distributed.tensor import DTensor

__all__ = ["check_writable", "fold", "get_state_dict", "load", "prepare_for_load"]

_MODEL, _OPTIMIZER, _PRUNER, _RECORDS = "model", "optimizer", "pruner", "masks"
_ORIGINAL, _MASK = "_orig", "_mask"

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Unmasked = Literal["error", "keep", "ones"]


class Stateful(Protocol):
    """What has a state, such as a ScheduledPruner."""

    def state_dict(self) -> dict[str, Any]:
        """The state, in plain values or tensors."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Go on from a state."""
        ...


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers = (),
    pruner: Stateful | None = None,
    *,
    group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """All that a training run with pruning has to save, for ``dcp.save`` or ``dcp.async_save``.

    Collective over ``group``, as saving is. See [Note: async_save].

    Args:
        model: wrapped or not; pruned or not.
        optimizers: of its parameters.
        pruner: a ScheduledPruner, or whatever has a state dict.
        group: the ranks that save together; every rank by default.

    Returns:
        {"model": ..., "optimizer": ..., "pruner": ..., "masks": ...}, without what was not given.
        "masks" is what ``verify`` knows of them, as JSON, if anything is pruned. Tensors
        are references, not copies, sharded as they are in the model. Keys are those of the
        unwrapped model ("layers.0.weight_orig", "layers.0.weight_mask"): no prefix of DDP,
        FSDP, activation checkpointing or ``torch.compile``.

    Raises:
        NotImplementedError: see :func:`check_writable`, on every rank.

    Cost: no tensor is copied or communicated; one all-reduce of 40 bytes. As torch's own
    function, an optimizer that never stepped makes one step with learning rate 0.
    """
    check_writable(model, group=group)
    state = _get_state_dict(model, optimizers, pruner)
    records = records_of(model)
    if records:
        state[_RECORDS] = json.dumps(records)
    return state


def load(
    checkpoint_id: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizers = (),
    pruner: Stateful | None = None,
    *,
    unmasked: Unmasked = "error",
    storage_reader: StorageReader | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Load what was saved with :func:`get_state_dict`, on any sharding, into a model.

    The model may be fresh: it is given a mask wherever the checkpoint has one. Collective
    over ``group``. Masks and weights are those that were saved, bit for bit; ``verify`` compares
    the masks with what was known of them then.

    Args:
        checkpoint_id: what ``dcp.save`` was given.
        model: wrapped or not; dense, or pruned in any way.
        optimizers: of its parameters, made before or after; as many as were saved.
        pruner: takes its saved state.
        unmasked: what becomes of a parameter that is pruned here and dense in the checkpoint:
            "error"; "keep" its mask on the loaded weights (rewinding); a mask of "ones".
        storage_reader: where it is not in files.
        group: the ranks that load together; every rank by default.

    Raises:
        ValueError: such a parameter, by name, with ``unmasked="error"``; ranks that see
            different checkpoints. Nothing has changed then.
        NotImplementedError: see :func:`check_writable`; reading goes the same way.
        Exception: whatever DCP raises, a missing key above all; weights may be loaded in
            part then.

    Cost: each rank reads the bytes that it holds, in place: no memory but the masks.
    """
    import torch.distributed.checkpoint as dcp

    communicator = world(group)
    reader = storage_reader or dcp.FileSystemReader(checkpoint_id)

    def read_plan() -> tuple[list[str], list[str], bool]:
        if unmasked not in ("error", "keep", "ones"):
            raise ValueError(f"unmasked={unmasked!r}; expected 'error', 'keep' or 'ones'.")
        keys = reader.read_metadata().state_dict_metadata
        prefix = _MODEL + "."
        has_records = _RECORDS in keys
        keys = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
        dense = [name for name in _pruned_here(model) if name in keys]
        if dense and unmasked == "error":
            raise ValueError(
                f"{', '.join(dense)}: pruned in the model and dense in the checkpoint; expected "
                "both pruned or both dense. Pass unmasked='keep' to put the masks in force on the "
                "loaded weights, unmasked='ones' to start unpruned, or remove() the pruning first."
            )
        return keys, dense, has_records

    plan, error = attempt(read_plan)
    keys, dense, has_records = plan or ([], [], False)
    facts = [("keys of the checkpoint", ", ".join(sorted(keys))), ("unmasked", unmasked)]
    communicator.agree(facts, error)
    check_writable(model, group=group)
    prepare_for_load(model, keys, group=group)

    as_saved = {name + _ORIGINAL: name for name in dense}
    state = _get_state_dict(model, optimizers, pruner)
    kept = {name + _MASK: state[_MODEL].pop(name + _MASK) for name in dense}
    if has_records:
        state[_RECORDS] = ""
    _rename(state, as_saved)
    dcp.load(state, checkpoint_id=checkpoint_id, storage_reader=storage_reader, process_group=group)
    _rename(state, {saved: name for name, saved in as_saved.items()})
    state[_MODEL].update(kept)
    _set_state_dict(model, optimizers, pruner, state)
    before = records_of(model)
    records = json.loads(state[_RECORDS]) if has_records else {}
    records |= {name: before[name] for name in dense if name in before}
    if unmasked == "ones":
        masks = _pruned_here(model)
        for name in dense:
            masks[name].fill_(1)
            records[name] = [0, 0]
    put_records(model, records)


def prepare_for_load(
    model: nn.Module, keys: Iterable[str], *, group: ProcessGroup | None = None
) -> None:
    """Give a mask of ones to every parameter that is pruned in a state dict and not in a model.

    For a state dict that :func:`load` does not read: a consolidated one, of this library or of a
    model pruned by ``torch.nn.utils.prune``. It loads then, by ``model.load_state_dict`` or
    ``set_model_state_dict``, since state dicts load into what exists. Collective over ``group``.

    Args:
        model: wrapped or not; parameters that are pruned already stay as they are.
        keys: a state dict, or its keys, without wrapper prefixes. Parameters that the
            model does not have are left out (those of another pipeline stage, say).
        group: as in ``global_unstructured``.

    Raises:
        Exception: as ``global_unstructured``; no module has changed then, on any rank.

    Cost: memory for the masks; a few small all-reduces.
    """
    communicator = world(group)
    pairs, error = attempt(_to_be_masked, model, keys)
    num_pairs = communicator.max(torch.tensor([0 if pairs is None else len(pairs)]))
    communicator.agree(error=error)
    if int(num_pairs[0]):
        global_unstructured(pairs, Identity, group=group)


def fold(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of the dense model with the zeros in its weights.

    ``x_orig`` and ``x_mask`` become ``x``: what ``remove`` would have left, pruned elements +0.

    Args:
        state_dict: of a pruned model; whole tensors or DTensors. Does not change.

    Returns:
        A new dict, in the same order; tensors that are not pruned are those of the argument.

    Cost: memory for the weights that are pruned.
    """
    folded = {}
    for key, value in state_dict.items():
        if _paired(key, _MASK, _ORIGINAL, state_dict) is not None:
            continue
        name = _paired(key, _ORIGINAL, _MASK, state_dict)
        if name is not None:
            mask = state_dict[name + _MASK]
            with torch.no_grad():
                value = (value * mask.to(value.dtype)).masked_fill(mask == 0, 0)
        folded[key if name is None else name] = value
    return folded


def check_writable(model: nn.Module, *, group: ProcessGroup | None = None) -> None:
    """Raise if DCP of this torch would write, or read, a shard of a parameter at a wrong place.

    That happens to FSDP2 over tensor parallelism where both cut the same dimension and do
    not divide it evenly (7 rows on a 3x2 mesh, 9 on 4x2): DCP of torch 2.13 then fails, or saves
    without an error and loses rows. Collective over ``group``.

    Raises:
        NotImplementedError: names the parameters, on every rank; nothing was written.

    Cost: arithmetic on shapes; one all-reduce of 40 bytes.
    """
    _, error = attempt(_check_boxes, model)
    world(group).agree(error=error)


def _check_boxes(model: nn.Module) -> None:
    managed = managed_parameters(model)
    wrong = []
    for path, module in named_modules(model):
        for name, parameter in module._parameters.items():
            # Registered may be the gathered copy; FSDP1's records have no DTensor.
            record = managed.get((id(module), name))
            parameter = getattr(record, "sharded", parameter)
            if is_dtensor(parameter) and _is_misplaced(name, parameter):
                wrong.append(
                    f"{_join(path, name)} (shape {tuple(parameter.shape)}, {parameter.placements} "
                    f"on a mesh of shape {tuple(parameter.device_mesh.shape)})"
                )
    if wrong:
        raise NotImplementedError(
            f"torch {torch.__version__} cannot save or load uneven shards that FSDP2 cut out of "
            f"tensor-parallel ones: {'; '.join(wrong)}. Expected a size that the mesh divides. Pad "
            "the dimension, take another mesh, or save a consolidated state dict."
        )


def _is_misplaced(name: str, parameter: DTensor) -> bool:
    from distprune.sharding import dtensor
    from distprune.wrappers import dcp

    if not dcp.may_be_misplaced(parameter):
        return False
    held = dtensor.local_shard(name, parameter, None).coordinates
    sizes, offsets = dcp.written_box(parameter)
    if 0 in sizes or not all(held):
        return (0 in sizes) != (not all(held))
    first = tuple(rows.start for rows in held)
    return first != tuple(offsets) or tuple(map(len, held)) != tuple(sizes)


def _pruned_here(model: nn.Module) -> dict[str, Tensor]:
    """The masks on this rank by the names of their parameters."""
    return {
        _join(path, hook._tensor_name): module._buffers[hook._tensor_name + _MASK]
        for path, module in named_modules(model)
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, PruningHook) and hook._tensor_name + _MASK in module._buffers
    }


def _to_be_masked(model: nn.Module, keys: Iterable[str]) -> list[NamedParameter]:
    """What is pruned in a state dict and dense in a model; tied parameters once, as one."""
    keys, wanted = set(keys), defaultdict(list)
    for key in sorted(keys):
        name = _paired(key, _MASK, _ORIGINAL, keys)
        if name is not None:
            path, _, leaf = name.rpartition(".")
            wanted[path].append(leaf)
    managed = managed_parameters(model)
    places: dict[Hashable, list[NamedParameter]] = {}
    for path, module in named_modules(model):
        for name in wanted[path]:
            record = managed.get((id(module), name))
            key = record.key if record is not None else module._parameters.get(name)
            if key is not None and find_hook(module, name) is None:
                places.setdefault(key, []).append(NamedParameter(module, name, _join(path, name)))
    return [same[0].with_places(same) for same in places.values()]


def _get_state_dict(
    model: nn.Module, optimizers: Optimizers, pruner: Stateful | None
) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    state: dict[str, Any] = {_MODEL: get_model_state_dict(model)}
    if optimizers:
        state[_OPTIMIZER] = get_optimizer_state_dict(model, optimizers)
    if pruner is not None:
        state[_PRUNER] = pruner.state_dict()
    return state


def _set_state_dict(
    model: nn.Module, optimizers: Optimizers, pruner: Stateful | None, state: dict[str, Any]
) -> None:
    from torch.distributed.checkpoint.state_dict import (
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    set_model_state_dict(model, state[_MODEL])
    if optimizers:
        set_optimizer_state_dict(model, optimizers, state[_OPTIMIZER])
    if pruner is not None:
        pruner.load_state_dict(state[_PRUNER])


def _rename(state: dict[str, Any], names: Mapping[str, str]) -> None:
    """Give parameters other names in the state of a model and of its optimizers."""
    optimizer = state.get(_OPTIMIZER, {"state": {}, "param_groups": []})
    for by_name in (state[_MODEL], optimizer["state"]):
        items = [(names.get(name, name), value) for name, value in by_name.items()]
        by_name.clear()
        by_name.update(items)
    for param_group in optimizer["param_groups"]:
        param_group["params"] = [names.get(name, name) for name in param_group["params"]]


def _paired(key: str, suffix: str, other: str, keys: Container[str]) -> str | None:
    """The name of a pruned parameter if ``key`` is one half of its pair of keys."""
    name = key.removesuffix(suffix)
    return name if name != key and name + other in keys else None


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
