"""Tied parameters of a checkpoint: what was pruned under each name, and if a model can hold it.

FSDP masks a parameter once, for all its names, and so does a pruning of all names together. A
plain model may have been saved with a mask under one name only, or with two that differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distprune._common.naming import NamedParameter, full_name, named_modules
from distprune._common.pruned_form import mask_key, name_of_pruned_mask, name_without_orig, orig_key
from distprune.masks.hook import find_hook
from distprune.torch_private.wrapper import managed_parameters

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
    for places in _pruned_places(model, keys, managed).values():
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
    managed = managed_parameters(model)
    names_of: dict[int, list[str]] = {}
    for module_id, name in managed:
        names_of.setdefault(module_id, []).append(name)
    tied: dict[Hashable, list[str]] = {}
    for path, module in named_modules(model):
        for registered in dict.fromkeys([*module._parameters, *names_of.get(id(module), ())]):
            record = managed.get((id(module), registered))
            parameter = module._parameters.get(registered)
            if record is None and parameter is None:
                continue
            key = record.key if record is not None else id(parameter)
            name = name_without_orig(registered)
            name = name if find_hook(module, name) is not None else registered
            tied.setdefault(key, []).append(full_name(path, name))
    return [names for names in tied.values() if len(names) > 1]


def check_masks_of_ties(model: nn.Module, keys: Iterable[str], reader: StorageReader) -> None:
    """Raise if names that share one mask in a model have different masks in a checkpoint.

    Call it on one rank: it reads the masks of tied parameters whole.

    Args:
        keys: of the model's state dict in the checkpoint, without the prefix "model.".

    Raises:
        ValueError: names both.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    managed = managed_parameters(model)
    for places in _pruned_places(model, set(keys), managed).values():
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


def _pruned_places(
    model: nn.Module, keys: set[str], managed: dict[tuple[int, str], Any]
) -> dict[Hashable, list[NamedParameter]]:
    """The parameters that are pruned in a state dict, with all names that are, in its order."""
    names_of_module = defaultdict(list)
    for key in sorted(keys):
        name = name_of_pruned_mask(key, keys)
        if name is not None:
            path, _, leaf = name.rpartition(".")
            names_of_module[path].append(leaf)
    places: dict[Hashable, list[NamedParameter]] = {}
    for path, module in named_modules(model):
        for name in names_of_module[path]:
            for registered in (name, orig_key(name)):
                record = managed.get((id(module), registered))
                parameter = module._parameters.get(registered)
                if record is not None or parameter is not None:
                    identity = record.key if record is not None else id(parameter)
                    place = NamedParameter(module, name, full_name(path, name))
                    places.setdefault(identity, []).append(place)
                    break
    return places
