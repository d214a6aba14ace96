"""The places at which a model is pruned on this rank, or has a trace of it, and their problems.

A mask acts if the parameter, the mask, the hook and the record of the wrapper exist and fit
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from distprune.base.naming import full_name, named_modules
from distprune.base.pruned_form import is_dtensor, mask_key, name_of_mask, orig_key
from distprune.masks.hook import PruningHook, holder_of, holds_zeros, hooks_on
from distprune.shards.reader import ShardReader
from distprune.wrappers import masked_value
from distprune.wrappers.held import find_held, held_names
from distprune.wrappers.managed import Managed, ManagedDTensor, ManagedRun
from distprune.wrappers.wrapper import is_managed


@dataclass
class Place:
    """A parameter under one of its names.

    Attributes:
        path: full name of the parameter.
        problems: what is wrong with the parameter under this name.
        is_readable: whether the mask and the parameter exist and fit each other.
    """

    path: str
    module: nn.Module
    name: str
    problems: list[str] = field(default_factory=list)
    is_readable: bool = True

    @cached_property
    def hooks(self) -> list[PruningHook]:
        """The pruning hooks of the parameter: one, unless something is wrong."""
        return [
            hook
            for hook in hooks_on(self.module)
            if getattr(hook, "_tensor_name", None) == self.name
        ]

    @property
    def hook(self) -> PruningHook | None:
        """Its pruning hook; None if it was deleted."""
        return next(iter(self.hooks), None)

    @property
    def original(self) -> Any:
        """The attribute that should be the parameter; None if it was deleted."""
        key = self.name if self.is_held else orig_key(self.name)
        registered = self.module._parameters.get(key)
        return self.module.__dict__.get(key) if registered is None else registered

    @property
    def is_held(self) -> bool:
        """Whether the mask acts by zeros in shards, and the parameter has its own name."""
        return holds_zeros(self.module, self.name)

    @property
    def mask(self) -> Any:
        """The buffer that should be the mask; None if it was deleted."""
        return self.module._buffers.get(mask_key(self.name))

    def fail(self, text: str) -> None:
        """Add a problem because of which the parameter cannot be read together with its mask."""
        self.problems.append(text)
        self.is_readable = False


def places_of(model: nn.Module, prefix: str = "") -> list[Place]:
    """Every place of the model that is pruned, or has a trace of a deleted mask."""
    prefix = prefix + "." if prefix else ""
    return [
        Place(prefix + full_name(path, name), module, name)
        for path, module in named_modules(model)
        for name in traces(module)
    ]


def traces(module: nn.Module) -> list[str]:
    """Names of the parameters that have a hook, a mask or what pruning adds to a module."""
    names: dict[str, None] = {
        hook._tensor_name: None for hook in hooks_on(module) if hasattr(hook, "_tensor_name")
    }
    for key in module._buffers:
        name = name_of_mask(key)
        if name is not None and _has_original(module, name) and not _is_of_torch(module, name):
            names[name] = None
    names |= dict.fromkeys((*masked_value.live_names(module), *held_names(module)))
    return list(names)


def _has_original(module: nn.Module, name: str) -> bool:
    if orig_key(name) in module._parameters:
        return True
    parameter, mask = module._parameters.get(name), module._buffers[mask_key(name)]
    return find_held(module, name) is not None or (
        is_dtensor(parameter) and is_dtensor(mask) and mask.dtype is torch.bool
    )


def _is_of_torch(module: nn.Module, name: str) -> bool:
    """Whether torch.nn.utils.prune has pruned the parameter, which this library ignores."""
    return any(
        type(hook).__module__ == "torch.nn.utils.prune"
        and getattr(hook, "_tensor_name", None) == name
        for hook in module._forward_pre_hooks.values()
    )


def check(place: Place, reader: ShardReader, managed: Mapping[tuple[int, str], Managed]) -> None:
    """Add to a place's problems everything that keeps its mask from acting."""
    module, name = place.module, place.name
    num_hooks = len(place.hooks)
    if not num_hooks:
        place.problems.append("its pruning hook is gone, so that nothing keeps the mask acting")
    elif num_hooks > 1:
        place.problems.append(f"it has {num_hooks} pruning hooks; expected one")
    if not place.is_held and module._parameters.get(name) is not None:
        place.problems.append(
            f"another parameter is registered as {name}, in the place of the masked one"
        )
    if not place.is_held and (is_dtensor(place.original) or is_managed(module, orig_key(name))):
        place.fail(
            "it was pruned before it was sharded, and its mask is whole; call masks_aside(model) "
            "around the wrapping"
        )
        return
    record = managed.get((id(module), name))
    if record is None:
        record = reader.managed(module, name)
    if record is None and not isinstance(place.original, Tensor):
        place.fail(f"{name if place.is_held else orig_key(name)} is gone")
    if not isinstance(place.mask, Tensor):
        place.fail(f"its mask, the buffer {mask_key(name)}, is gone")
    if not place.is_readable:
        return
    if place.is_held:
        _check_held(place, record)
        return
    _check_layout(place, place.original)
    if masked_value.must_be_live(module) and not masked_value.is_live(module, name):
        place.problems.append(f"{name} is not computed when it is read, as it has to be here")


def _check_held(place: Place, record: Managed | None) -> None:
    module, name = place.module, place.name
    held = holder_of(module, name)
    if (None if held.record is None else held.record.key) != (
        None if record is None else record.key
    ):
        place.fail(
            "it was wrapped anew, and its mask acts on what the earlier wrapper had; call "
            "masks_aside(model) around the wrapping"
        )
        return
    replacement = record.plain_replacement if isinstance(record, ManagedDTensor) else None
    if replacement is not None:
        place.fail(
            f"{name} was replaced by {_described(replacement)}, which its wrapper cannot gather; "
            "load a state dict of DTensors, or without assign=True"
        )
        return
    if record is not None and not record.has_registered(module, name):
        place.fail(f"{name} was replaced by a parameter that the wrapper does not have")
    parameter = place.original if record is None else _parameter_of(record)
    # With CPU offload FSDP1 moves buffers to the accelerator for good, and parameters for use.
    _check_layout(place, parameter, may_be_elsewhere=record is not None)
    if place.is_readable and place.mask.dtype is not torch.bool:
        place.fail(f"its mask has dtype {place.mask.dtype}; expected torch.bool on shards")
    if not place.is_readable:
        return
    for stored, mask in held.stored():
        number = int((stored[mask.to(stored.device) == 0] != 0).sum())
        if number:
            place.problems.append(f"{number} pruned elements are not zero in what the rank stores")


def _parameter_of(record: Managed) -> Tensor:
    """The parameter in the form that the wrapper shards: a DTensor or a run."""
    if isinstance(record, ManagedDTensor):
        return record.sharded
    assert isinstance(record, ManagedRun)
    return record.values


def _check_layout(place: Place, parameter: Tensor, *, may_be_elsewhere: bool = False) -> None:
    """Add a problem if a mask is not laid out like its parameter; on its device, or on any."""
    mask: Tensor = place.mask
    fits = (
        mask.shape == parameter.shape
        and (may_be_elsewhere or mask.device == parameter.device)
        and is_dtensor(mask) == is_dtensor(parameter)
    )
    if fits and is_dtensor(mask) and is_dtensor(parameter):
        fits = (
            mask.device_mesh == parameter.device_mesh
            and tuple(mask.placements) == tuple(parameter.placements)
            and mask.to_local().shape == parameter.to_local().shape
        )
    if not fits:
        place.fail(
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
