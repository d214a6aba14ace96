"""Keep masks through everything that uses ``Module._apply``: ``to_empty()``, ``.to()``, ...

``to_empty()`` gives every buffer uninitialised memory. A mask of random bits would prune at
random without an error, and only a new pruning could set it right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from distprune._common.pruned_form import mask_key

KEY = "_apply"


def install(module: nn.Module, name: str) -> None:
    """Keep the mask of ``module.<name>`` from now on."""
    apply = module.__dict__.get(KEY)
    if apply is None:
        apply = module.__dict__[KEY] = _ApplyKeepingMasks(module)
    apply.names.add(name)


def uninstall(module: nn.Module) -> None:
    """Undo :func:`install`, once the module has no mask any more."""
    apply = module.__dict__.get(KEY)
    if apply is not None and not apply.has_masks():
        del module.__dict__[KEY]


class _ApplyKeepingMasks:
    """Replaces the method ``_apply`` of one module.

    It is an object and not a closure, and an attribute of the module and not of a subclass, so
    that it is copied and pickled with the module, whose class does not change.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.names: set[str] = set()

    def has_masks(self) -> bool:
        """Whether the module has any of the masks."""
        buffers = self._module._buffers
        return any(isinstance(buffers.get(mask_key(name)), Tensor) for name in self.names)

    def masks(self) -> dict[str, Tensor]:
        """The masks that the module has. (FSDP1 removes parameters during ``_apply``.)"""
        buffers = self._module._buffers
        masks = {mask_key(name): buffers.get(mask_key(name)) for name in self.names}
        return {key: mask for key, mask in masks.items() if isinstance(mask, Tensor)}

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        module = self._module
        masks = self.masks()
        apply: Callable[..., nn.Module] = type(module)._apply
        apply(module, *args, **kwargs)
        for key, new_mask in self.masks().items():
            mask = masks[key]
            if new_mask is not mask:
                # A meta tensor has no values: keep the mask on its device.
                device = mask.device if new_mask.is_meta else new_mask.device
                module._buffers[key] = mask.to(device=device, dtype=new_mask.dtype)
        for hook in module._forward_pre_hooks.values():
            if hasattr(hook, "note_again"):  # the parameter may be a new object
                hook.note_again(module)
        return module
