"""Dense state dicts of pruned models, and what Hugging Face's ``from_pretrained`` loads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from distprune._common.naming import unwrap
from distprune._common.process_groups import is_distributed, world
from distprune._common.pruned_form import (
    mask_key,
    masked_product,
    name_of_pruned_mask,
    name_of_pruned_orig,
)
from distprune.api.checkpoint_ties import tied_names
from distprune.masks.checks import check_ties, check_writable
from distprune.torch_private.wrapper import is_flattened


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
        kwargs: for ``model.save_pretrained`` on rank 0 (``max_shard_size``, ...).

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
    check_writable(model)

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
