"""What a pruned module does before and after its state dict is taken and loaded.

Plain functions, which copies and pickles of a module keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distprune.base.pruned_form import is_dtensor, mask_key, orig_key
from distprune.masks.hook import PruningHook, hold_again, holds_zeros, hooks_on
from distprune.wrappers.held import Held, find_held
from distprune.wrappers.managed import ManagedRun


def watch(module: nn.Module) -> None:
    """Call the functions of this file from now on."""
    if _after_loading in module._load_state_dict_post_hooks.values():
        return
    module.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]
    if list(_held_by(module)):
        module.register_state_dict_pre_hook(_before_saving)  # type: ignore[no-untyped-call]
        module.register_state_dict_post_hook(_after_saving)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_before_loading)  # type: ignore[no-untyped-call]


def unwatch(module: nn.Module) -> None:
    """Undo :func:`watch`, once the module has no mask any more."""
    if any(_masked(module)):
        return
    for registry in (
        module._load_state_dict_post_hooks,
        module._load_state_dict_pre_hooks,
        module._state_dict_pre_hooks,
        module._state_dict_hooks,
    ):
        for key, hook in list(registry.items()):
            if getattr(hook, "hook", hook) in _FUNCTIONS:
                del registry[key]


def _masked(module: nn.Module) -> Iterator[PruningHook]:
    """The hooks of the parameters that still have a mask."""
    for hook in hooks_on(module):
        if isinstance(module._buffers.get(mask_key(hook._tensor_name)), Tensor):
            yield hook


def _held_by(module: nn.Module) -> Iterator[tuple[str, Held]]:
    for hook in _masked(module):
        name = hook._tensor_name
        if holds_zeros(module, name):
            yield name, find_held(module, name) or hold_again(module, name)


def _runs_of(module: nn.Module) -> Iterator[tuple[str, Held, ManagedRun]]:
    for name, held in _held_by(module):
        if isinstance(held.record, ManagedRun):
            yield mask_key(name), held, held.record


def _before_saving(module: nn.Module, *_: Any) -> None:
    for _name, held in _held_by(module):
        held.zero()


def _after_saving(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for key, held, record in _runs_of(module):
        saved = record.mask_in_state_dict(held.mask)
        if saved is not None:
            state_dict[prefix + key] = saved


def _before_loading(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    for key, held, record in _runs_of(module):
        key = prefix + key
        if key not in state_dict:
            if strict:
                missing_keys.append(key)
            continue
        saved = state_dict.pop(key)
        try:
            held.mask.copy_(record.run_in_state_dict(saved) != 0)
        except ValueError as error:
            error_msgs.append(
                f"size mismatch for {key}: the state dict has {tuple(saved.size())}, expected "
                f"{error}."
            )


def _after_loading(module: nn.Module, incompatible_keys: Any) -> None:
    """Zero what was loaded; compute the masked values of a plain module anew."""
    for hook in _masked(module):
        name = hook._tensor_name
        if holds_zeros(module, name):
            (find_held(module, name) or hold_again(module, name)).zero()
        elif _fit(module, name):
            with torch.enable_grad():
                hook.refresh_product(module)


_FUNCTIONS = (_before_saving, _after_saving, _before_loading, _after_loading)


def _fit(module: nn.Module, name: str) -> bool:
    """Whether the loaded mask and parameter can be multiplied."""
    original, mask = module._parameters.get(orig_key(name)), module._buffers[mask_key(name)]
    return (
        original is not None
        and mask is not None
        and original.shape == mask.shape
        and original.device == mask.device
        and is_dtensor(original) == is_dtensor(mask)
    )
