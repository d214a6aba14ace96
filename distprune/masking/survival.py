"""Masks outlive whatever goes through ``Module._apply``: ``to_empty()``, ``.to()``, ``.double()``.

``to_empty()`` gives every buffer uninitialised memory. A mask of garbage would prune at
random, or nothing, in silence; nobody but pruning itself could initialise it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

KEY = "_apply"
_MASK, _ORIGINAL = "_mask", "_orig"


def install(module: nn.Module) -> None:
    """Keep the masks of a module from now on."""
    module.__dict__.setdefault(KEY, _ApplyKeepingMasks(module))


def uninstall(module: nn.Module) -> None:
    """Undo :meth:`install`, once the module has no mask any more."""
    if next(_mask_names(module), None) is None:
        module.__dict__.pop(KEY, None)


class _ApplyKeepingMasks:
    """What stands on a module in place of its method ``_apply``.

    An object and not a closure, and on the module itself and not on a subclass: it is copied
    and pickled with the module, whose class stays what it was.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        module = self._module
        before = {name: module._buffers[name] for name in _mask_names(module)}
        type(module)._apply(module, *args, **kwargs)
        for name, mask in before.items():
            now = module._buffers[name]
            if now is not mask and isinstance(mask, Tensor) and isinstance(now, Tensor):
                # A meta tensor holds nothing: the mask waits where it is.
                device = mask.device if now.is_meta else now.device
                module._buffers[name] = mask.to(device=device, dtype=now.dtype)
        return module


def _mask_names(module: nn.Module) -> Iterator[str]:
    for name in module._buffers:
        original = name.removesuffix(_MASK) + _ORIGINAL
        # FSDP1 without use_orig_params registers no parameter.
        if name.endswith(_MASK) and (original in module._parameters or original in vars(module)):
            yield name
