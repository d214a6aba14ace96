"""Update pruned modules after ``load_state_dict``.

``assign=True`` registers new parameters, which is no error. And the masked weight of a plain
module, which its hook computes before forward, would otherwise keep the previous values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from distprune._common.pruned_form import is_dtensor, mask_key, orig_key
from distprune.masks.hook import PruningHook
from distprune.torch_private import live_property


def install(module: nn.Module) -> None:
    """Update the module after each ``load_state_dict`` from now on."""
    if not any(isinstance(hook, _AfterLoading) for hook in _hooks(module).values()):
        register: Callable[[Any], object] = module.register_load_state_dict_post_hook
        register(_AfterLoading())


def uninstall(module: nn.Module) -> None:
    """Undo :func:`install`, once the module has no mask any more."""
    for key, hook in list(_hooks(module).items()):
        if isinstance(hook, _AfterLoading) and not any(hook.pruned(module)):
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
        """The hooks of the parameters that still have a mask."""
        return [
            hook
            for hook in module._forward_pre_hooks.values()
            if isinstance(hook, PruningHook)
            and isinstance(module._buffers.get(mask_key(hook._tensor_name)), Tensor)
        ]


def _has_product(module: nn.Module, name: str) -> bool:
    """Whether the module has a masked weight, and its loaded factors fit each other."""
    original, mask = module._parameters.get(orig_key(name)), module._buffers[mask_key(name)]
    return (
        isinstance(module.__dict__.get(name), Tensor)
        and not live_property.is_live(module, name)
        and original is not None
        and mask is not None
        and original.shape == mask.shape
        and original.device == mask.device
        and is_dtensor(original) == is_dtensor(mask)
    )


def _hooks(module: nn.Module) -> dict[int, Any]:
    return module._load_state_dict_post_hooks
