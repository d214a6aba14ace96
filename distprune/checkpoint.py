"""Checkpoints of pruned models with torch.distributed.checkpoint (DCP).

Masks are buffers of the model, and DTensors where the parameters are, so DCP saves and
reshards them like any other tensor. Save with::

    state = checkpoint.get_state_dict(model, optimizer, pruner)
    dcp.save(state, checkpoint_id=path)

and resume, on any other sharding or on one process, with::

    checkpoint.load(path, model, optimizer, pruner)   # model: fresh, dense or pruned

[Note: async_save] ``dcp.async_save`` communicates from a thread while training continues. If
training or pruning uses the same process group meanwhile, their messages mix and the job hangs.
Give it a group of its own, made once: ``process_group=dist.new_group(backend="gloo")``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from distprune._common.naming import NamedParameter
from distprune._common.process_groups import world
from distprune._common.pruned_form import mask_key, orig_key
from distprune.api.global_unstructured import global_unstructured
from distprune.api.state_dicts import check_masks_of_ties, fold, save_pretrained, to_be_masked
from distprune.masks.checks import check_writable
from distprune.masks.hook import pruned_parameters, put_records, records_of
from distprune.methods.builtin import Identity

if TYPE_CHECKING:  # importing DCP and DTensor costs more than all the rest
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.storage import StorageReader

__all__ = [
    "check_writable",
    "fold",
    "get_state_dict",
    "load",
    "prepare_for_load",
    "save_pretrained",
]

_MODEL, _OPTIMIZER, _PRUNER, _RECORDS = "model", "optimizer", "pruner", "masks"

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Unmasked = Literal["error", "keep", "ones"]


class Stateful(Protocol):
    """An object with a state dict, such as a ScheduledPruner."""

    def state_dict(self) -> dict[str, Any]:
        """The state, in plain values or tensors."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore a state."""
        ...


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers = (),
    pruner: Stateful | None = None,
    *,
    group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """The state of a training run with pruning, for ``dcp.save`` or ``dcp.async_save``.

    Collective over ``group``, as saving is. See [Note: async_save].

    Args:
        model: wrapped or not; pruned or not.
        optimizers: of its parameters.
        pruner: a ScheduledPruner, or any object with a state dict.
        group: the ranks that save together; every rank by default.

    Returns:
        {"model": ..., "optimizer": ..., "pruner": ..., "masks": ...}, without what was not given.
        "masks" is the record of the masks for ``verify``, as JSON, if anything is pruned. Tensors
        are references, not copies, sharded as they are in the model. Keys are those of the
        unwrapped model ("layers.0.weight_orig", "layers.0.weight_mask"): no prefix of DDP,
        FSDP, activation checkpointing or ``torch.compile``.

    Raises:
        NotImplementedError: see :func:`check_writable`, on every rank.

    Cost: no tensor is copied or communicated; one all-reduce of 40 bytes. As with torch's own
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
    """Load a checkpoint of :func:`get_state_dict`, saved on any sharding, into a model.

    The model may be fresh: it gets a mask wherever the checkpoint has one. Collective
    over ``group``. Masks and weights are those that were saved, bit for bit; ``verify`` compares
    the masks with their saved record.

    Args:
        checkpoint_id: as for ``dcp.save``.
        model: wrapped or not; dense, or pruned in any way.
        optimizers: of its parameters, made before or after pruning; as many as were saved.
        pruner: restores its saved state.
        unmasked: what to do with a parameter that is pruned in the model and dense in the
            checkpoint: "error"; "keep" its mask on the loaded weights (rewinding); "ones" for a
            mask of ones.
        storage_reader: for checkpoints that are not in files.
        group: the ranks that load together; every rank by default.

    Raises:
        ValueError: such a parameter, by name, with ``unmasked="error"``; ranks that see
            different checkpoints; a tied parameter that was saved with different masks under its
            names, or with a mask under some of them, for a model that has one mask for all.
            Nothing has changed then.
        NotImplementedError: see :func:`check_writable`, which also applies to reading.
        Exception: whatever DCP raises, such as for a missing key; some weights may be loaded
            then.

    Cost: each rank reads the bytes of its own shards, in place, with no memory but the masks. The
    first rank also reads the masks of tied parameters whole.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    communicator = world(group)
    reader = storage_reader or FileSystemReader(checkpoint_id)

    def read_contents() -> _Contents:
        contents = _contents_for(model, reader, unmasked)
        if communicator.index == 0:
            check_masks_of_ties(model, contents.keys, reader)
        return contents

    contents = communicator.run(
        read_contents,
        lambda contents: [
            ("keys of the checkpoint", ", ".join(sorted(contents.keys))),
            ("unmasked", unmasked),
        ],
    )
    keys, dense, has_records = contents
    check_writable(model, group=group)
    prepare_for_load(model, keys, group=group)

    as_saved = {orig_key(name): name for name in dense}
    state = _get_state_dict(model, optimizers, pruner)
    kept = {mask_key(name): state[_MODEL].pop(mask_key(name)) for name in dense}
    if has_records:
        state[_RECORDS] = ""
    _rename(state, as_saved)
    state_dict_loader.load(
        state,
        checkpoint_id=checkpoint_id,
        storage_reader=storage_reader,
        process_group=group,
    )
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


class _Contents(NamedTuple):
    """What a checkpoint has, for a model.

    Attributes:
        keys: of the model's state dict.
        dense: parameters that are pruned in the model and dense in the checkpoint.
        has_records: whether the records of the masks were saved.
    """

    keys: list[str]
    dense: list[str]
    has_records: bool


def _contents_for(model: nn.Module, reader: StorageReader, unmasked: Unmasked) -> _Contents:
    """Read what a checkpoint has; raises a ValueError if ``unmasked`` does not allow it."""
    if unmasked not in ("error", "keep", "ones"):
        raise ValueError(f"unmasked={unmasked!r}; expected 'error', 'keep' or 'ones'.")
    entries = reader.read_metadata().state_dict_metadata
    prefix = _MODEL + "."
    keys = [key.removeprefix(prefix) for key in entries if key.startswith(prefix)]
    dense = [name for name in _pruned_here(model) if name in keys]
    if dense and unmasked == "error":
        raise ValueError(
            f"{', '.join(dense)}: pruned in the model and dense in the checkpoint; expected "
            "both pruned or both dense. Pass unmasked='keep' to put the masks in force on the "
            "loaded weights, unmasked='ones' to start unpruned, or remove() the pruning first."
        )
    return _Contents(keys, dense, _RECORDS in entries)


def prepare_for_load(
    model: nn.Module, keys: Iterable[str], *, group: ProcessGroup | None = None
) -> None:
    """Give a mask of ones to every parameter that is pruned in a state dict and not in a model.

    For a state dict that :func:`load` cannot read: a consolidated one, of this library or of a
    model pruned by ``torch.nn.utils.prune``. ``model.load_state_dict`` or ``set_model_state_dict``
    can load it then, because they load into existing tensors only. Collective over ``group``.

    Args:
        model: wrapped or not; parameters that are pruned already do not change.
        keys: a state dict, or its keys, without wrapper prefixes. Parameters that the
            model does not have are ignored (those of another pipeline stage, for example).
        group: as in ``global_unstructured``.

    Raises:
        ValueError: FSDP shards a tied parameter that is pruned under some of its names only.
        Exception: as ``global_unstructured``. No module has changed then, on any rank.

    Cost: memory for the masks; a few small all-reduces.
    """
    communicator = world(group)
    pairs: list[NamedParameter] = []

    def count_pairs() -> Tensor:
        pairs.extend(to_be_masked(model, keys))
        return torch.tensor([len(pairs)])

    if int(communicator.max(communicator.run(count_pairs))[0]):
        global_unstructured(pairs, Identity, group=group)


def _pruned_here(model: nn.Module) -> dict[str, Tensor]:
    """The masks on this rank by the names of their parameters."""
    masks = {
        name: module._buffers.get(mask_key(hook._tensor_name))
        for name, module, hook in pruned_parameters(model)
    }
    return {name: mask for name, mask in masks.items() if mask is not None}


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
