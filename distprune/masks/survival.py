"""Keep masks through everything that uses ``Module._apply``: ``to_empty()``, ``.to()``, ...

``to_empty()`` gives every buffer uninitialised memory. A mask of random bits would prune at
random without an error, and only a new pruning could set it right.

[Note: extended _apply] Only a method knows which module it is called on: an attribute of the module
is copied by ``copy.copy``, and would convert the module that it was made for. And a subclass would
change the class of every pruned module. So ``nn.Module._apply`` itself is extended, once a
process has a pruned module; for any other module it costs one look into a dictionary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from distprune._common.pruned_form import mask_key

KEY, _EXTENDED = "_distprune_masked_names", "_distprune_extended"


def install(module: nn.Module, name: str) -> None:
    """Keep the mask of ``module.<name>`` from now on."""
    module.__dict__.setdefault(KEY, _MaskedNames()).add(name)


def uninstall(module: nn.Module) -> None:
    """Undo :func:`install`, once the module has no mask any more."""
    if not _masks(module):
        module.__dict__.pop(KEY, None)


def masked_names(module: nn.Module) -> list[str]:
    """The parameters that were pruned, also those whose mask was deleted since."""
    return sorted(module.__dict__.get(KEY, ()))


class _MaskedNames(set[str]):
    """Names of the parameters of a module whose masks are kept.

    Making one extends ``_apply``, also where a pruned module is loaded, in another process.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__(names)
        _extend_apply()


def _extend_apply() -> None:
    """See [Note: extended _apply]."""
    original: Callable[..., nn.Module] = nn.Module._apply
    if hasattr(original, _EXTENDED):
        return

    @functools.wraps(original)
    def apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if KEY not in self.__dict__:
            return original(self, *args, **kwargs)
        masks = _masks(self)
        original(self, *args, **kwargs)
        _restore(self, masks)
        return self

    setattr(apply, _EXTENDED, True)
    nn.Module._apply = apply  # type: ignore[method-assign]


def _masks(module: nn.Module) -> dict[str, Tensor]:
    """The masks that a module has. (FSDP1 removes parameters during ``_apply``.)"""
    masks = {mask_key(name): module._buffers.get(mask_key(name)) for name in masked_names(module)}
    return {key: mask for key, mask in masks.items() if isinstance(mask, Tensor)}


def _restore(module: nn.Module, masks: dict[str, Tensor]) -> None:
    for key, new_mask in _masks(module).items():
        mask = masks[key]
        if new_mask is not mask:
            # A meta tensor has no values: keep the mask on its device.
            device = mask.device if new_mask.is_meta else new_mask.device
            module._buffers[key] = mask.to(device=device, dtype=new_mask.dtype)
    for hook in module._forward_pre_hooks.values():
        if hasattr(hook, "note_again"):  # the parameter may be a new object
            hook.note_again(module)
