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

A tied parameter is saved with one mask under all its names, or with none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from distprune.api.global_unstructured import global_unstructured
from distprune.base import pruned_form
from distprune.base.naming import NamedParameter, registered_parameters, unwrap
from distprune.base.pruned_form import MASK, ORIG, is_dtensor, stored_key
from distprune.masks import hook as masks
from distprune.methods.base import Identity
from distprune.ranks.collectives import is_distributed, world
from distprune.shards.reader import all_places, by_parameter, check_saveable
from distprune.wrappers.wrapper import is_flattened, managed_parameters

if TYPE_CHECKING:
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


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers = (),
    pruner: Any = None,
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
        unwrapped model ("layers.0.weight", "layers.0.weight_mask"; of a plain parameter
        "layers.0.weight_orig"): no prefix of DDP, FSDP, activation checkpointing or
        ``torch.compile``.

    Raises:
        NotImplementedError: see :func:`check_writable`, on every rank.
        ValueError: a tied parameter is pruned differently under its names, or under one of them.

    Cost: no tensor is copied or communicated; two all-reduces of 40 bytes. As with torch's own
    function, an optimizer that never stepped makes one step with learning rate 0.
    """
    world(group).run(lambda: masks.check_ties(model))
    check_writable(model, group=group)
    state = _state_of(model, optimizers, pruner)
    records = masks.records_of(model)
    if records:
        state[_RECORDS] = json.dumps(records)
    return state


def load(
    checkpoint_id: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizers = (),
    pruner: Any = None,
    *,
    unmasked: Literal["error", "keep"] = "error",
    model_key: str = _MODEL,
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
            checkpoint: "error", or "keep" its mask on the loaded weights (rewinding).
        model_key: the key of the model's state dict in the checkpoint; another one if another
            program has saved it.
        storage_reader: for checkpoints that are not in files.
        group: the ranks that load together; every rank by default.

    Raises:
        ValueError: such a parameter, by name, with ``unmasked="error"``; ranks that see
            different checkpoints. Nothing has changed then.
        NotImplementedError: see :func:`check_writable`, which also applies to reading.
        Exception: whatever DCP raises, such as for a missing key; some weights may be loaded
            then.

    Cost: each rank reads the bytes of its own shards, in place, with no memory but the masks.
    """
    from torch.distributed.checkpoint import filesystem, state_dict, state_dict_loader

    ranks = world(group)
    reader = storage_reader or filesystem.FileSystemReader(checkpoint_id)
    entries: dict[str, Any] = {}
    dense: list[str] = []

    def read_entries() -> list[str]:
        if unmasked not in ("error", "keep"):
            raise ValueError(f"unmasked={unmasked!r}; expected 'error' or 'keep'.")
        entries.update(reader.read_metadata().state_dict_metadata)
        prefix = model_key + "."
        keys = {key.removeprefix(prefix) for key in entries if key.startswith(prefix)}
        for name, module, hook in masks.pruned_parameters(model):
            is_pruned = module._buffers.get(hook._tensor_name + MASK) is not None
            if is_pruned and name in keys and name + MASK not in keys:
                dense.append(name)
        if dense and unmasked == "error":
            raise ValueError(
                f"{', '.join(dense)}: pruned in the model and dense in the checkpoint; expected "
                "both pruned, or unmasked='keep', which puts the masks on the loaded weights."
            )
        return sorted(keys)

    keys = ranks.run(
        read_entries,
        lambda keys: [("keys of the checkpoint", ", ".join(keys)), ("unmasked", unmasked)],
    )
    check_writable(model, group=group)
    # A plain module calls "weight_orig" what shards call "weight".
    names = prepare_for_load(model, keys, group=group)
    state = _state_of(model, optimizers, pruner)
    values = state.pop(_MODEL)
    kept = {name + MASK: values.pop(name + MASK) for name in dense}
    present = {saved: name for name, saved in names.items()}
    state[model_key] = _renamed(values, names)
    if optimizers:
        optimizer = state[_OPTIMIZER]
        optimizer["state"] = _renamed(optimizer["state"], names)
    if _RECORDS in entries:
        state[_RECORDS] = ""
    state_dict_loader.load(
        state, checkpoint_id=checkpoint_id, storage_reader=storage_reader, process_group=group
    )
    state_dict.set_model_state_dict(model, _renamed(state[model_key], present) | kept)
    if optimizers:
        optimizer["state"] = _renamed(optimizer["state"], present)
        for param_group in optimizer["param_groups"]:
            param_group["params"] = [present.get(name, name) for name in param_group["params"]]
        state_dict.set_optimizer_state_dict(model, optimizers, optimizer)
    if pruner is not None:
        pruner.load_state_dict(state[_PRUNER])
    before = masks.records_of(model)
    records = json.loads(state.get(_RECORDS, "{}"))
    masks.put_records(model, records | {name: before[name] for name in dense if name in before})


def check_writable(
    model: nn.Module, *, group: ProcessGroup | None = None, is_gathered: bool = False
) -> None:
    """Raise if DCP of this torch would write or read a shard of a parameter at a wrong offset.

    That happens with FSDP2 over tensor parallelism if both shard the same dimension and do
    not divide it evenly (7 rows on a 3x2 mesh, 9 on 4x2): DCP of torch 2.13 then fails, or saves
    without an error and loses rows. It happens to a part of each of several groups of rows, too,
    which DCP takes for one box. Collective over ``group``.

    Args:
        is_gathered: whole tensors are written, which torch makes of such groups without a mistake.

    Raises:
        NotImplementedError: names the first such parameter, on every rank; nothing was written.

    Cost: arithmetic on shapes; one all-reduce of 40 bytes.
    """

    def check() -> None:
        managed = managed_parameters(model)
        for fqn, module, name, registered in registered_parameters(model):
            # What is registered may be the gathered copy; FSDP1's records have no DTensor.
            parameter = getattr(managed.get((id(module), name)), "parameter", registered)
            if is_dtensor(parameter):
                check_saveable(fqn, parameter, is_gathered=is_gathered)

    world(group).run(check)


def prepare_for_load(
    model: nn.Module, state: Mapping[str, Any] | Iterable[str], *, group: ProcessGroup | None = None
) -> dict[str, Any]:
    """Give a mask of ones to every parameter that is pruned in a state dict and not in a model.

    For a state dict that :func:`load` cannot read: a consolidated one, of this library or of a
    model pruned by ``torch.nn.utils.prune``. ``model.load_state_dict`` or ``set_model_state_dict``
    can load what is returned, because they load into existing tensors only. Collective over
    ``group``.

    Args:
        model: wrapped or not; parameters that are pruned already do not change.
        state: a state dict, or its keys, without wrapper prefixes. Parameters that the
            model does not have are ignored (those of another pipeline stage, for example).
        group: as in ``global_unstructured``.

    Returns:
        The state dict with the names of the model: values of a pruned parameter are ``weight_orig``
        on a plain module, ``weight`` where it is sharded. Of keys, {name in the model: key}.

    Raises:
        ValueError: FSDP shards a tied parameter that is pruned under some of its names only.
        Exception: as ``global_unstructured``. No module has changed then, on any rank.

    Cost: memory for the masks; a few small all-reduces.
    """
    ranks = world(group)
    values: dict[str, Any] = {}
    pairs: list[NamedParameter] = []

    def count_pairs() -> Tensor:
        values.update(state if isinstance(state, Mapping) else {key: key for key in state})
        pairs.extend(_dense_pairs(model, values))
        return torch.tensor([len(pairs)])

    if int(ranks.max(ranks.run(count_pairs))[0]):
        global_unstructured(pairs, Identity, group=group)
    names = {}
    for name, module, hook in masks.pruned_parameters(model):
        is_held = masks.holds_zeros(module, hook._tensor_name)
        names[stored_key(name, values)] = name if is_held else name + ORIG
    return {names.get(key, key): value for key, value in values.items()}


def _state_of(model: nn.Module, optimizers: Optimizers, pruner: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint import state_dict

    state: dict[str, Any] = {_MODEL: state_dict.get_model_state_dict(model)}
    if optimizers:
        state[_OPTIMIZER] = state_dict.get_optimizer_state_dict(model, optimizers)
    if pruner is not None:
        state[_PRUNER] = pruner.state_dict()
    return state


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}


def _dense_pairs(model: nn.Module, keys: Container[str]) -> list[NamedParameter]:
    """What is pruned in a state dict and dense in a model; tied parameters once, as one.

    Raises:
        ValueError: FSDP masks a tied parameter under all its names, and the state dict has it
            pruned under some of them.
    """
    managed, pairs = managed_parameters(model), []
    for tied in by_parameter(all_places(model)).values():
        places = [place.pair for place in tied]
        # A file may have one name only of a tied parameter.
        stored = [place for place in places if stored_key(place.fqn, keys) in keys]
        dense = [place for place in stored if place.fqn + MASK not in keys]
        free = [p for p in places if p[1] + MASK not in p[0]._buffers and p not in dense]
        fresh = [place for place in free if masks.find_hook(*place) is None]
        if len(dense) == len(stored) or not fresh:
            continue
        if dense and (id(fresh[0][0]), fresh[0][1]) in managed:
            raise ValueError(
                f"{fresh[0].fqn} is pruned in the state dict, and {dense[0].fqn}, to which it is "
                "tied, is not; expected the same mask under both names, as FSDP has it."
            )
        pairs.append(fresh[0].with_places(fresh))
    return pairs


def fold(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of the dense model with the zeros in its weights.

    ``x_orig`` and ``x_mask``, or ``x`` and ``x_mask`` of shards, become ``x``: what ``remove``
    would have left, pruned elements +0.

    Args:
        state_dict: that of a pruned model: whole tensors or DTensors. It does not change.

    Returns:
        A new dict, in the same order; tensors that are not pruned are those of the argument.

    Cost: memory for the weights that are pruned.
    """
    folded = {}
    for key, value in state_dict.items():
        masked = pruned_form.name_of_pruned_mask(key, state_dict)
        if masked is not None and value.shape == state_dict[stored_key(masked, state_dict)].shape:
            continue
        name = pruned_form.name_of_pruned_orig(key, state_dict)
        if name is not None:
            mask = state_dict[name + MASK]
            with torch.no_grad():
                value = pruned_form.masked_product(value, mask).masked_fill(mask == 0, 0)
        folded[key if name is None else name] = value
    return folded


def save_pretrained(model: nn.Module, path: str | os.PathLike[str], **kwargs: Any) -> None:
    """Save a pruned Hugging Face model as an ordinary one, with the zeros in its weights.

    ``model.save_pretrained`` writes ``weight_orig`` and ``weight_mask`` of a model that is still
    pruned; ``from_pretrained`` does not know them, and leaves such layers at random. This writes
    what ``from_pretrained`` loads, and the model stays pruned. Collective over all ranks; rank 0
    writes.

    Args:
        model: a transformers model, wrapped or not, pruned or not.
        path: the folder to write.
        kwargs: arguments of ``model.save_pretrained`` on rank 0 (``max_shard_size``, ...).

    Raises:
        TypeError: the model has no ``save_pretrained``; ``state_dict`` or ``is_main_process`` is
            given.
        ValueError: a tied parameter is pruned differently under its names.
        NotImplementedError: see :func:`check_writable`; gathering goes the same way.
        Exception: what rank 0 raises when it writes; on every rank.

    Cost: every parameter is gathered, in turn, and rank 0 holds the whole model on the CPU.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    ranks, whole = world(), is_distributed()
    saved: Any = unwrap(model)

    def check() -> None:
        if not hasattr(saved, "save_pretrained"):
            raise TypeError(
                f"model is a {type(saved).__name__}, which has no save_pretrained; expected a "
                "model of transformers, wrapped or not. fold(state_dict) does the same for others."
            )
        for name in {"state_dict", "is_main_process"} & kwargs.keys():
            raise TypeError(f"{name} is chosen here; expected others of save_pretrained.")
        masks.check_ties(model)

    def gather() -> dict[str, Any]:
        # FSDP1 of torch 2.13, dense too, dies of a segmentation fault where it is asked to offload
        # to the CPU what is there already.
        is_fsdp1 = any(is_flattened(m, name) for m in model.modules() for name in m._parameters)
        is_on_cpu = all(p.device.type == "cpu" for p in model.parameters())
        offload = whole and not (is_fsdp1 and is_on_cpu)
        options = StateDictOptions(full_state_dict=whole, cpu_offload=offload)
        state = get_model_state_dict(model, options=options)
        return {} if ranks.index else fold(state)

    def write() -> None:
        if ranks.index:
            return
        # Tied ones were gathered, and folded, one by one; as one tensor they are written once.
        for tied in by_parameter(all_places(model)).values():
            first, *others = (place.pair.fqn for place in tied)
            folded.update({name: folded[first] for name in others if name in folded})
        # By this transformers would shard and gather once more, on every rank.
        of_config = vars(saved.config)
        sharding = {k: of_config.pop(k) for k in ("distributed_config",) if k in of_config}
        try:
            saved.save_pretrained(path, state_dict=folded, **kwargs)
        finally:
            of_config.update(sharding)

    ranks.run(check)
    check_writable(model, is_gathered=True)
    folded = ranks.run(gather)
    ranks.run(write)
