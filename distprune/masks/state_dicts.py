"""What a pruned module does before and after its state dict is taken and loaded.

Plain functions, which copies and pickles of a module keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distprune.base.pruned_form import is_dtensor, mask_key, orig_key
from distprune.masks.hook import PruningHook, holder_of, holds_zeros, hooks_on, refresh_product
from distprune.wrappers.held import Held
from distprune.wrappers.managed import StoredRun

# Under which a module registers each of these functions: torch counts its hooks from 0 on.
_KEY = -1


def watch(module: nn.Module, *, is_held: bool) -> None:
    """Call the functions of this file from now on."""
    module._load_state_dict_post_hooks[_KEY] = _after_loading
    if is_held and _KEY not in module._state_dict_pre_hooks:
        module._state_dict_pre_hooks[_KEY] = _before_saving
        module._state_dict_hooks[_KEY] = _after_saving
        # Of all, torch passes the module only to this one if it is registered so.
        handle = module.register_load_state_dict_pre_hook(_before_loading)  # type: ignore[no-untyped-call]
        before = module._load_state_dict_pre_hooks
        before[_KEY] = before.pop(handle.id)


def unwatch(module: nn.Module) -> None:
    """Undo :func:`watch`, once the module has no mask any more."""
    if not any(_masked(module)):
        module._load_state_dict_post_hooks.pop(_KEY, None)
        if _KEY in module._state_dict_pre_hooks:
            del module._state_dict_pre_hooks[_KEY]
            del module._state_dict_hooks[_KEY]
            del module._load_state_dict_pre_hooks[_KEY]


def _masked(module: nn.Module) -> Iterator[PruningHook]:
    """The hooks of the parameters that still have a mask."""
    for hook in hooks_on(module):
        if isinstance(module._buffers.get(mask_key(hook._tensor_name)), Tensor):
            yield hook


def _held_by(module: nn.Module) -> Iterator[tuple[str, Held]]:
    for hook in _masked(module):
        if holds_zeros(module, hook._tensor_name):
            yield mask_key(hook._tensor_name), holder_of(module, hook._tensor_name)


def _before_saving(module: nn.Module, *_: Any) -> None:
    for _key, held in _held_by(module):
        held.zero()


def _after_saving(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for key, held in _held_by(module):
        if isinstance(held.record, StoredRun):
            saved = held.record.mask_in_state_dict(held.mask)
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
    for key, held in _held_by(module):
        if not isinstance(held.record, StoredRun):
            continue
        key = prefix + key
        if key in state_dict:
            saved = state_dict.pop(key)
            try:
                held.mask.copy_(held.record.run_in_state_dict(saved) != 0)
            except ValueError as error:
                error_msgs.append(
                    f"size mismatch for {key}: the state dict has {tuple(saved.size())}, expected "
                    f"{error}."
                )
        elif strict:
            missing_keys.append(key)


def _after_loading(module: nn.Module, incompatible_keys: Any) -> None:
    """Zero what was loaded; compute the masked values of a plain module anew."""
    for hook in _masked(module):
        name = hook._tensor_name
        if holds_zeros(module, name):
            holder_of(module, name).zero()
            continue
        original, mask = module._parameters.get(orig_key(name)), module._buffers[mask_key(name)]
        assert mask is not None
        if (
            original is not None
            and (original.shape, original.device) == (mask.shape, mask.device)
            and is_dtensor(original) == is_dtensor(mask)
        ):
            with torch.enable_grad():
                refresh_product(module, hook)
