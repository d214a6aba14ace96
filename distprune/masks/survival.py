"""Masks outlive whatever goes through ``Module._apply``: ``to_empty()``, ``.to()``, ``.double()``.

``to_empty()`` gives every buffer uninitialised memory. A mask of garbage would prune at
random, or nothing, in silence; nobody but pruning itself could initialise it again.
"""

from __future__ import annotations

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
    """Undo :meth:`install`, once the module has no mask any more."""
    apply = module.__dict__.get(KEY)
    if apply is not None and not apply.has_masks():
        del module.__dict__[KEY]


class _ApplyKeepingMasks:
    """What stands on a module in place of its method ``_apply``.

    An object and not a closure, and on the module itself and not on a subclass: it is copied
    and pickled with the module, whose class stays what it was.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.names: set[str] = set()

    def has_masks(self) -> bool:
        """Whether one is there; stops at the first."""
        buffers = self._module._buffers
        return any(isinstance(buffers.get(mask_key(name)), Tensor) for name in self.names)

    def masks(self) -> dict[str, Tensor]:
        """The masks that are there; FSDP1 takes the parameters away during ``_apply``."""
        buffers = self._module._buffers
        keys = [mask_key(name) for name in self.names]
        return {key: buffers[key] for key in keys if isinstance(buffers.get(key), Tensor)}

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        module = self._module
        before = self.masks()
        type(module)._apply(module, *args, **kwargs)
        for key, now in self.masks().items():
            mask = before[key]
            if now is not mask:
                # A meta tensor holds nothing: the mask waits where it is.
                device = mask.device if now.is_meta else now.device
                module._buffers[key] = mask.to(device=device, dtype=now.dtype)
        for hook in module._forward_pre_hooks.values():
            if hasattr(hook, "note_again"):  # the parameter may be another object now
                hook.note_again(module)
        return module
