"""After ``load_state_dict``: pruned modules take note of what was loaded into them.

``assign=True`` puts other parameters on a module, which is no fault; and the masked weight of a
plain module, which its hook computes before forward, would else be that of the values before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distprune._common.pruned_form import is_dtensor, mask_key, orig_key
from distprune.masks.hook import PruningHook
from distprune.torch_private import live_property


def install(module: nn.Module) -> None:
    """Let a module take note from now on."""
    if not any(isinstance(each, _AfterLoading) for each in _hooks(module).values()):
        module.register_load_state_dict_post_hook(_AfterLoading())


def uninstall(module: nn.Module) -> None:
    """Undo :meth:`install`, once the module has no mask any more."""
    for key, each in list(_hooks(module).items()):
        if isinstance(each, _AfterLoading) and not any(each.pruned(module)):
            del _hooks(module)[key]


class _AfterLoading:
    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        for hook in self.pruned(module):
            hook.note_again(module)
            if _has_product(module, hook._tensor_name):
                with torch.enable_grad():
                    setattr(module, hook._tensor_name, hook.apply_mask(module))

    @staticmethod
    def pruned(module: nn.Module) -> list[PruningHook]:
        """The hooks of what has a mask still."""
        return [
            hook
            for hook in module._forward_pre_hooks.values()
            if isinstance(hook, PruningHook)
            and isinstance(module._buffers.get(mask_key(hook._tensor_name)), Tensor)
        ]


def _has_product(module: nn.Module, name: str) -> bool:
    """Whether there is a masked weight, and what was loaded can be multiplied."""
    original, mask = module._parameters.get(orig_key(name)), module._buffers[mask_key(name)]
    return (
        isinstance(module.__dict__.get(name), Tensor)
        and not live_property.is_live(module, name)
        and original is not None
        and original.shape == mask.shape
        and original.device == mask.device
        and is_dtensor(original) == is_dtensor(mask)
    )


def _hooks(module: nn.Module) -> dict[int, Any]:
    return module._load_state_dict_post_hooks
