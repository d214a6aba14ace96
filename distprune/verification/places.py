"""The pruned parameters of a model on this rank, and traces of deleted masks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from distprune._common.naming import full_name, named_modules
from distprune._common.pruned_form import mask_key, name_of_mask, orig_key
from distprune.masks import guards
from distprune.masks.hook import PruningHook
from distprune.torch_private import masked_value


@dataclass
class Place:
    """A parameter under one of its names.

    Attributes:
        path: full name of the parameter.
        hook: its pruning hook; None if it was deleted.
        problems: what is wrong with the parameter under this name.
        is_readable: whether the mask and the parameter exist and fit each other.
    """

    path: str
    module: nn.Module
    name: str
    hook: PruningHook | None
    problems: list[str] = field(default_factory=list)
    is_readable: bool = True

    @property
    def original(self) -> Any:
        """The attribute that should be the unmasked parameter; None if it was deleted."""
        key = orig_key(self.name)
        registered = self.module._parameters.get(key)
        return self.module.__dict__.get(key) if registered is None else registered

    @property
    def mask(self) -> Any:
        """The buffer that should be the mask; None if it was deleted."""
        return self.module._buffers.get(mask_key(self.name))


def places_of(model: nn.Module, prefix: str = "") -> list[Place]:
    """Every place of the model that is pruned, or has a trace of a deleted mask."""
    places = []
    for path, module in named_modules(model):
        path = ".".join(filter(None, (prefix, path)))
        for name in _traces(module):
            places.append(place_of(module, name, full_name(path, name)))
    return places


def place_of(module: nn.Module, name: str, path: str) -> Place:
    """One place, pruned or not."""
    hooks = hooks_of(module, name)
    return Place(path, module, name, hooks[0] if hooks else None)


def is_traced(module: nn.Module, name: str) -> bool:
    """Whether a parameter is pruned, or has a trace of a deleted mask."""
    return name in _traces(module)


def _traces(module: nn.Module) -> list[str]:
    """Names of the parameters that have a hook, a mask or what pruning adds to a module."""
    names: dict[str, None] = {
        hook._tensor_name: None
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, PruningHook) and hasattr(hook, "_tensor_name")
    }
    for key in module._buffers:
        name = name_of_mask(key)
        if name is not None and _has_original(module, name) and not _is_of_torch(module, name):
            names[name] = None
    for name in guards.masked_names(module):
        has_trace = _has_original(module, name) or masked_value.is_live(module, name)
        if has_trace or masked_value.shard_mask_key(name) in module.__dict__:
            names[name] = None
    return list(names)


def _has_original(module: nn.Module, name: str) -> bool:
    key = orig_key(name)
    return key in module._parameters or isinstance(module.__dict__.get(key), Tensor)


def _is_of_torch(module: nn.Module, name: str) -> bool:
    """Whether torch.nn.utils.prune has pruned the parameter, which this library ignores."""
    return any(
        type(hook).__module__ == "torch.nn.utils.prune"
        and getattr(hook, "_tensor_name", None) == name
        for hook in module._forward_pre_hooks.values()
    )


def hooks_of(module: nn.Module, name: str) -> list[PruningHook]:
    """The pruning hooks of a parameter: one, unless something is wrong."""
    return [
        hook
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, PruningHook) and getattr(hook, "_tensor_name", None) == name
    ]
