"""Checks before a mask is attached to a module, detached from it, or cut into shards.

Every check raises before anything changes, and names the parameter. The checks do not
communicate: where several ranks act together, the caller shares the error.

The installed torch.distributed.checkpoint would misplace some shards; these are refused.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from distprune.base.naming import Pair, registered_parameters
from distprune.base.pruned_form import (
    is_dtensor,
    local_tensor,
    lost_mask,
    mask_key,
    name_without_orig,
)
from distprune.masks.attach import tied_places
from distprune.masks.hook import PruningHook, find_hook
from distprune.ranks.collectives import world
from distprune.wrappers.wrapper import doubtful_box, managed_parameters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

_CALL = nn.Module._call_impl.__code__


def check_state(module: nn.Module, name: str) -> PruningHook | None:
    """Raise if ``module.<name>`` is pruned, but not in the form of this library; find its hook.

    Raises:
        RuntimeError: its mask was deleted.
        ValueError: torch.nn.utils.prune has pruned it. Two hooks would multiply two masks, and
            the hook that remains after a removal fails at the next forward.
    """
    if not module._forward_pre_hooks:
        return None
    found = find_hook(module, name)
    if found is not None:
        if not isinstance(module._buffers.get(mask_key(name)), Tensor):
            raise lost_mask(module, name)
        return found
    theirs = getattr(sys.modules.get("torch.nn.utils.prune"), "BasePruningMethod", ())
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, theirs) and hook._tensor_name == name:
            raise ValueError(
                f"{type(module).__name__}.{name} was pruned by torch.nn.utils.prune already; "
                "expected a parameter that it has not pruned. To keep its mask, take it over: "
                f"mask = module.{mask_key(name)}; torch.nn.utils.prune.remove(module, {name!r}); "
                f"distprune.custom_from_mask(module, {name!r}, mask)."
            )
    return None


def check_idle(module: nn.Module, label: str) -> None:
    """Raise inside a backward, or inside a forward of the module or of one that contains it.

    For sharded parameters: a gathered copy, or the graph, has the values under the present mask.

    Raises:
        RuntimeError: names the parameter and what is running.

    Cost: a comparison per frame of the stack.
    """
    running = None
    if torch._C._current_graph_task_id() != -1:
        running = "a backward"
    frame: FrameType | None = sys._getframe()
    while running is None and frame is not None:
        if frame.f_code is _CALL:
            caller = frame.f_locals["self"]
            if any(submodule is module for submodule in caller.modules()):
                running = f"the forward of {type(caller).__name__}"
        frame = frame.f_back
    if running is not None:
        raise RuntimeError(
            f"{label} is sharded, and {running} is running, which has read it; "
            "expected a call between two steps, such as after optimizer.step(), and none from a "
            "hook of a module or of a tensor."
        )


def check_binary(mask: Tensor, label: str) -> None:
    """Raise if a mask has values other than 0 and 1.

    Raises:
        ValueError: names the parameter and the value.
    """
    if mask.dtype == torch.bool:
        return
    other = (mask != 0) & (mask != 1)
    if bool(other.any()):
        raise ValueError(
            f"{label}: its mask has the value {float(mask[other][0]):g}; expected 0 and 1 only, "
            "because the mask of a sharded parameter says what is kept, and scales nothing. "
            "Multiply the factors into the parameter, and pass (mask != 0)."
        )


def check_hook(hook: PruningHook, label: str) -> None:
    """Raise if a method overrides apply_mask, which has no effect on sharded parameters.

    Raises:
        NotImplementedError: names the parameter and the method.
    """
    if not hook.multiplies:
        raise NotImplementedError(
            f"{label}: {type(hook).__name__} has an apply_mask of its own, and the parameter is "
            "sharded, where a mask acts without it; expected the apply_mask of BasePruningMethod."
        )


def check_removable(module: nn.Module, name: str) -> list[Pair]:
    """Raise if the pruning of ``module.<name>`` cannot be made final; returns its other places.

    Raises:
        RuntimeError: see :func:`check_state`.
        ValueError: the parameter was pruned as one with its other names, and has another mask there
            by now. One parameter can have the zeros of one mask only.
    """
    others = tied_places(module, check_state(module, name))
    for other, owned in others:
        _check_equal((_label(module, name), module, name), (_label(other, owned), other, owned))
    return others


def check_ties(model: nn.Module) -> None:
    """Raise if a tied parameter of a model is pruned differently under its names, or under one.

    Args:
        model: plain.

    Raises:
        RuntimeError: see :func:`check_state`.
        ValueError: names both.
    """
    first: dict[int, tuple[str, nn.Module, str]] = {}
    for fqn, module, registered, parameter in registered_parameters(model):
        name = name_without_orig(registered)
        if name == registered or find_hook(module, name) is None:
            place = fqn, module, registered
        else:
            check_state(module, name)
            place = name_without_orig(fqn), module, name
        _check_equal(first.setdefault(id(parameter), place), place)


def _label(module: nn.Module, name: str) -> str:
    return f"{type(module).__name__}.{name}"


def _check_equal(place: tuple[str, nn.Module, str], other: tuple[str, nn.Module, str]) -> None:
    masks = [
        None if find_hook(module, name) is None else module._buffers.get(mask_key(name))
        for _, module, name in (place, other)
    ]
    if masks[0] is masks[1]:
        return
    local, of_other = (None if mask is None else local_tensor(mask) for mask in masks)
    if local is None or of_other is None or not torch.equal(local, of_other.to(local)):
        raise ValueError(
            f"{place[0]} is tied to {other[0]}, and pruned differently there; expected equal "
            "masks, because one parameter can hold the zeros of one mask only, and the other name "
            "would lose its own. Prune all names together (select lists them as one), or give each "
            "name the other's mask too, by custom_from_mask: then both have the zeros of both."
        )


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
        NotImplementedError: names the parameters, on every rank; nothing was written.

    Cost: arithmetic on shapes; one all-reduce of 40 bytes.
    """
    world(group).run(lambda: _check_boxes(model, is_gathered))


def _check_boxes(model: nn.Module, is_gathered: bool) -> None:
    managed = managed_parameters(model)
    wrong = []
    for fqn, module, name, registered in registered_parameters(model):
        # What is registered may be the gathered copy; FSDP1's records have no DTensor.
        parameter = getattr(managed.get((id(module), name)), "parameter", registered)
        if is_dtensor(parameter) and is_misplaced(name, parameter, is_gathered=is_gathered):
            wrong.append(
                f"{fqn} (shape {tuple(parameter.shape)}, {parameter.placements} "
                f"on a mesh of shape {tuple(parameter.device_mesh.shape)})"
            )
    if wrong:
        raise misplaced("; ".join(wrong))


def misplaced(what: str) -> NotImplementedError:
    """The error for shards that :func:`is_misplaced` finds."""
    return NotImplementedError(
        f"{what}: torch {torch.__version__} cannot save or load uneven shards that FSDP2 cut out "
        "of tensor-parallel ones, nor shards that have a part of each of several groups of rows. "
        "Expected a size that the mesh divides, and whole dimensions. Pad the dimension, use "
        "another mesh, or save a consolidated state dict."
    )


def is_misplaced(name: str, parameter: DTensor, *, is_gathered: bool = False) -> bool:
    """Whether DCP of this torch would write or read this rank's shard at a wrong offset."""
    from distprune.shards.reader import local_shard

    box = doubtful_box(parameter)
    if box is None:
        return False
    sizes, offsets = box
    shard = local_shard(name, parameter, None)
    if shard.index.fold is not None:
        return not is_gathered
    # Per dimension, the range of global indices that this rank has.
    ranges = shard.coordinates
    if 0 in sizes or not all(ranges):
        return (0 in sizes) != (not all(ranges))
    starts = tuple(indices.start for indices in ranges)
    return starts != tuple(offsets) or tuple(map(len, ranges)) != tuple(sizes)
