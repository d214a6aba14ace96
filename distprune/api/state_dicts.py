"""State dicts of pruned models: dense ones, what ``from_pretrained`` loads, and tied parameters.

FSDP masks a tied parameter once, for all its names, and so does a pruning of all names together. A
plain model may have been saved with a mask under one name only, or with two that differ.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distprune._common.naming import NamedParameter, full_name, named_modules, unwrap
from distprune._common.process_groups import is_distributed, world
from distprune._common.pruned_form import (
    mask_key,
    masked_product,
    name_of_pruned_mask,
    name_of_pruned_orig,
)
from distprune.masks.checks import check_ties, check_writable
from distprune.masks.hook import find_hook
from distprune.shards.parameters import all_places, by_parameter
from distprune.torch_private.wrapper import is_flattened, managed_parameters

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader


def to_be_masked(model: nn.Module, keys: Iterable[str]) -> list[NamedParameter]:
    """What is pruned in a state dict and dense in a model; tied parameters once, as one.

    Raises:
        ValueError: FSDP masks a tied parameter under all its names, and the state dict has it
            pruned under some of them.
    """
    keys = set(keys)
    managed = managed_parameters(model)
    path_of = {id(module): path for path, module in named_modules(model)}
    pairs = []
    for places in _pruned_places(model, keys):
        fresh = [place for place in places if find_hook(*place) is None]
        record = managed.get((id(places[0][0]), places[0][1]))
        for owner, name in record.owners if record is not None and fresh else ():
            fqn = full_name(path_of.get(id(owner), ""), name)
            if fqn in keys:
                raise ValueError(
                    f"{fresh[0].fqn} is pruned in the state dict, and {fqn}, to which it is tied, "
                    "is not; expected the same mask under both names, because FSDP masks the "
                    "parameter under all of them. Load the state dict into a plain model, prune "
                    "the other name by custom_from_mask with the same mask (which changes what "
                    "the model computes) or remove() the pruning, and save that."
                )
        if fresh:
            pairs.append(fresh[0].with_places(fresh))
    return pairs


def tied_names(model: nn.Module) -> list[list[str]]:
    """The full names of every tied parameter, free of ``_orig``, in the model's order."""
    return [[place.fqn for place in places] for places in _by_parameter(model) if len(places) > 1]


def check_masks_of_ties(model: nn.Module, keys: Iterable[str], reader: StorageReader) -> None:
    """Raise if names that share one mask in a model have different masks in a checkpoint.

    Call it on one rank: it reads the masks of tied parameters whole.

    Args:
        keys: the keys of the model's state dict in the checkpoint, without the prefix "model.".

    Raises:
        ValueError: names both.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    for places in _pruned_places(model, set(keys)):
        # Fresh names are pruned as one.
        masks = {id(m._buffers.get(mask_key(name))) for m, name in places}
        if len(places) < 2 or len(masks) > 1:
            continue
        entries = reader.read_metadata().state_dict_metadata
        state: dict[str, Tensor] = {}
        for place in places:
            key = f"model.{mask_key(place.fqn)}"
            entry = entries[key]
            assert isinstance(entry, TensorStorageMetadata)  # a mask is a tensor
            state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        load(state, storage_reader=reader, no_dist=True)
        first = state[f"model.{mask_key(places[0].fqn)}"]
        for place in places[1:]:
            if not torch.equal(first != 0, state[f"model.{mask_key(place.fqn)}"] != 0):
                raise ValueError(
                    f"{place.fqn} is tied to {places[0].fqn}, and their masks in the checkpoint "
                    "differ; expected equal ones, because the model has one mask for both. Load "
                    "it into a plain model whose names have masks of their own "
                    "(distprune.identity(module, name) for each of them)."
                )


def _by_parameter(model: nn.Module, names: set[str] | None = None) -> list[list[NamedParameter]]:
    """All places of each parameter, or those of some full names, in the model's order."""
    chosen = (place for place in all_places(model) if names is None or place.pair.fqn in names)
    return [[place.pair for place in places] for places in by_parameter(chosen).values()]


def _pruned_places(model: nn.Module, keys: set[str]) -> list[list[NamedParameter]]:
    """The parameters that are pruned in a state dict, with all names that are."""
    names = {name_of_pruned_mask(key, keys) for key in keys}
    return _by_parameter(model, {name for name in names if name is not None})


def fold(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of the dense model with the zeros in its weights.

    ``x_orig`` and ``x_mask`` become ``x``: what ``remove`` would have left, pruned elements +0.

    Args:
        state_dict: that of a pruned model: whole tensors or DTensors. It does not change.

    Returns:
        A new dict, in the same order; tensors that are not pruned are those of the argument.

    Cost: memory for the weights that are pruned.
    """
    folded = {}
    for key, value in state_dict.items():
        if name_of_pruned_mask(key, state_dict) is not None:
            continue
        name = name_of_pruned_orig(key, state_dict)
        if name is not None:
            mask = state_dict[mask_key(name)]
            with torch.no_grad():
                value = masked_product(value, mask).masked_fill(mask == 0, 0)
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
    communicator = world()
    saved = communicator.run(lambda: _check_pretrained(model, kwargs))
    check_writable(model, is_gathered=True)

    def gather_and_write() -> None:
        state = _gather(model)
        if communicator.index == 0:
            _write_pretrained(model, saved, state, path, kwargs)

    communicator.run(gather_and_write)


def _check_pretrained(model: nn.Module, kwargs: Mapping[str, Any]) -> Any:
    saved = unwrap(model)
    if not hasattr(saved, "save_pretrained"):
        raise TypeError(
            f"model is a {type(saved).__name__}, which has no save_pretrained; expected a model "
            "of transformers, wrapped or not. fold(state_dict) does the same for any other."
        )
    for name in ("state_dict", "is_main_process"):
        if name in kwargs:
            raise TypeError(f"{name} is chosen here; expected other arguments of save_pretrained.")
    check_ties(model)
    return saved


def _gather(model: nn.Module) -> dict[str, Any]:
    """The whole state dict, on rank 0 at least."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    whole = is_distributed()
    # FSDP1 of torch 2.13, dense too, dies of a segmentation fault where it is asked to offload
    # to the CPU what is there already.
    is_fsdp1 = any(is_flattened(m, name) for m in model.modules() for name in m._parameters)
    offload = whole and not (is_fsdp1 and all(p.device.type == "cpu" for p in model.parameters()))
    return get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=whole, cpu_offload=offload)
    )


def _write_pretrained(
    model: nn.Module,
    saved: Any,
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    kwargs: Mapping[str, Any],
) -> None:
    folded = fold(state)
    # Tied ones were gathered, and folded, one by one; as one tensor they are written once.
    for first, *others in tied_names(model):
        folded.update({name: folded[first] for name in others if name in folded})
    # By this transformers would shard and gather once more, on every rank.
    of_config = vars(saved.config)
    sharding = {k: of_config.pop(k) for k in ("distributed_config",) if k in of_config}
    try:
        saved.save_pretrained(path, state_dict=folded, **kwargs)
    finally:
        of_config.update(sharding)
