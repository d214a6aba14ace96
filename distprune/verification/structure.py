"""Checks of whether everything that lets a mask act exists and fits, on this rank."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from distprune._common.pruned_form import is_dtensor, mask_key, orig_key
from distprune.masks.hook import layout_of
from distprune.shards.reader import ShardReader
from distprune.torch_private import live_property
from distprune.torch_private.managed import Managed, ManagedDTensor, ManagedRun, ShardMask
from distprune.verification.places import Place, hooks_of


def check(place: Place, reader: ShardReader, managed: Mapping[tuple[int, str], Managed]) -> None:
    """Add to a place's problems everything that keeps its mask from acting.

    Args:
        managed: the wrappers' present records, from torch_private.wrapper.managed_parameters.
    """
    module, name = place.module, place.name
    problems, original = place.problems, orig_key(name)
    hooks = hooks_of(module, name)
    if not hooks:
        problems.append("its pruning hook is gone, so that nothing keeps the mask acting")
    elif len(hooks) > 1:
        problems.append(f"it has {len(hooks)} pruning hooks; expected one")
    if module._parameters.get(name) is not None:
        problems.append(
            f"another parameter is registered as {name}, in the place of the masked one"
        )
    if not isinstance(place.original, Tensor):
        problems.append(f"{original} is gone")
        place.is_readable = False
    if not isinstance(place.mask, Tensor):
        problems.append(f"its mask, the buffer {mask_key(name)}, is gone")
        place.is_readable = False
    if not place.is_readable:
        return
    record = managed.get((id(module), original), managed.get((id(module), name)))
    shard_mask = module.__dict__.get(live_property.shard_mask_key(name))
    if record is None:
        record = reader.managed(module, name)
    if record is not None:
        _check_managed(place, record, shard_mask)
    else:
        _check_unmanaged(place, shard_mask)


def _check_managed(place: Place, record: Managed, shard_mask: ShardMask | None) -> None:
    module, name, problems = place.module, place.name, place.problems
    original = orig_key(name)
    if shard_mask is None:
        problems.append(
            "it was wrapped after it had been pruned, and its mask is whole on every rank; call "
            "shard_masks(model) after wrapping"
        )
        place.is_readable = False
        return
    masked_record = shard_mask.managed()
    if masked_record is None or masked_record.key != record.key:
        problems.append(
            "it was wrapped anew, and its mask acts on what the earlier wrapper had; call "
            "masks_aside(model) around the wrapping"
        )
        place.is_readable = False
        return
    replacement = record.plain_replacement if isinstance(record, ManagedDTensor) else None
    if replacement is not None:
        problems.append(
            f"{original} was replaced by {_described(replacement)}, which its wrapper cannot "
            "gather; load a state dict of DTensors, or without assign=True"
        )
        place.is_readable = False
        return
    if not shard_mask.is_attached():
        problems.append("its mask is not attached to the shard, which is gathered unmasked")
    if not live_property.is_live(module, name):
        problems.append(f"the class of the module was changed, so that {name} is not masked")
    if not record.has_registered(module, original):
        problems.append(f"{original} was replaced by a parameter that the wrapper does not have")
        place.is_readable = False
    problem = _layout_problem(_parameter_of(record), place.mask)
    if problem is None and "bool" not in str(place.mask.dtype):
        problem = f"its mask has dtype {place.mask.dtype}; expected torch.bool under FSDP"
    if problem is not None:
        problems.append(problem)
        place.is_readable = False


def _parameter_of(record: Managed) -> Tensor:
    """The unmasked parameter in the form that the wrapper shards: a DTensor or a run."""
    if isinstance(record, ManagedDTensor):
        return record.sharded
    assert isinstance(record, ManagedRun)
    return record.values


def _check_unmanaged(place: Place, shard_mask: ShardMask | None) -> None:
    module, name, problems = place.module, place.name, place.problems
    original, parameter = orig_key(name), place.original
    if shard_mask is not None:
        problems.append("the FSDP wrapper that its mask acted in does not have it any more")
        place.is_readable = False
        return
    problem = _layout_problem(parameter, place.mask)
    if problem is not None:
        problems.append(problem)
        place.is_readable = False
    is_live = live_property.is_live(module, name)
    if live_property.is_needed(module, name) and not is_live:
        problems.append(f"{name} is not computed when it is read, as it has to be here")
    hook = place.hook
    if hook is None or hook.layout is None:
        return
    if layout_of(parameter) != hook.layout:
        problems.append(
            f"{original} has the layout: {layout_of(parameter)}; it was pruned as: {hook.layout}"
        )
    elif hook.is_another(parameter):
        problems.append(f"{original} was replaced by another parameter than the one pruned")


def _layout_problem(parameter: Tensor, mask: Tensor) -> str | None:
    """A problem if a mask is not laid out like its parameter."""
    fits = mask.shape == parameter.shape and mask.device == parameter.device
    if is_dtensor(mask) and is_dtensor(parameter):
        fits = (
            fits
            and mask.device_mesh == parameter.device_mesh
            and tuple(mask.placements) == tuple(parameter.placements)
            and mask.to_local().shape == parameter.to_local().shape
        )
    else:
        fits = fits and not is_dtensor(mask) and not is_dtensor(parameter)
    if fits:
        return None
    return (
        f"its mask is {_described(mask)}, and the parameter {_described(parameter)}; expected "
        "the same layout"
    )


def _described(tensor: Tensor) -> str:
    kind = f"a tensor of shape {tuple(tensor.shape)} on {tensor.device}"
    if not is_dtensor(tensor):
        return kind
    return (
        f"a DTensor of shape {tuple(tensor.shape)} with {tensor.placements} on a mesh of shape "
        f"{tuple(tensor.device_mesh.shape)}, {tuple(tensor.to_local().shape)} here"
    )
