"""Guards of masks against code of others: conversions of modules, and merges of adapters.

``to_empty()`` gives every buffer uninitialised memory. A mask of random bits would prune at
random without an error, and only a new pruning could set it right.

[Note: extended _apply] Only a method knows which module it is called on: an attribute of the module
is copied by ``copy.copy``, and would convert the module that it was made for. And a subclass would
change the class of every pruned module. So ``nn.Module._apply`` itself is extended, once a
process has a pruned module; for any other module it costs one look into a dictionary.

[Note: lost merges] PEFT merges an adapter by ``base_layer.weight.data += delta``. The ``weight`` of
a pruned module is a product, computed again before each forward: what was added to it is
gone then, and PEFT, which takes the adapter for merged, leaves it out. Nothing says so. Therefore
the method in which every tuner of PEFT checks whether a merge is possible is extended, once
PEFT is loaded and a module is pruned, by a check for pruned layers. Layers that
``distprune.integrations.peft.hold_zeros`` has prepared are merged as they should be.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from distprune._common.pruned_form import mask_key

KEY, _EXTENDED = "_distprune_masked_names", "_distprune_extended"


def keep_mask(module: nn.Module, name: str) -> None:
    """Keep the mask of ``module.<name>`` from now on."""
    names = module.__dict__.get(KEY)
    if names is None:
        names = module.__dict__[KEY] = _MaskedNames()
    names.add(name)


def stop_keeping(module: nn.Module) -> None:
    """Undo :func:`keep_mask`, once the module has no mask any more."""
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
        if hasattr(hook, "refresh_parameter_id"):  # the parameter may be a new object
            hook.refresh_parameter_id(module)


_CHECK, _GUARDED = "_check_merge_allowed", "_distprune_guarded"


def holds_zeros(layer: nn.Module) -> bool:
    """Whether every adapter of a LoRA layer leaves the zeros of the base weight zero."""
    variants = getattr(layer, "lora_variant", {})
    held = {name for name, each in variants.items() if getattr(each, "holds_zeros", False)}
    return bool(held) and set(getattr(layer, "lora_A", ())) <= held


def guard_merges() -> None:
    """Make PEFT, if it is loaded, refuse merges that would be lost; see [Note: lost merges]."""
    tuner: Any = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTuner", None)
    check = getattr(tuner, _CHECK, None)
    if check is None or hasattr(check, _GUARDED):
        return

    @functools.wraps(check)
    def guarded(self: Any) -> None:
        _check_pruned(self.model)
        check(self)

    setattr(guarded, _GUARDED, True)
    setattr(tuner, _CHECK, guarded)


def _check_pruned(model: nn.Module) -> None:
    lost = [
        path
        for path, layer in model.named_modules()
        if isinstance(base := getattr(layer, "base_layer", None), nn.Module)
        and hasattr(layer, "merged_adapters")
        and any(map(_prunes_weight, base._forward_pre_hooks.values()))
        and not holds_zeros(layer)
    ]
    if lost:
        raise RuntimeError(
            f"{', '.join(lost[:3])}{f' and {len(lost) - 3} more' if len(lost) > 3 else ''}: the "
            "weight is pruned, and an adapter that PEFT merges into it would be lost at the next "
            "forward; expected layers that hold their zeros. Call "
            "distprune.integrations.peft.hold_zeros(model) after get_peft_model, or make the "
            "pruning permanent with distprune.remove before."
        )


def _prunes_weight(hook: object) -> bool:
    return getattr(hook, "_tensor_name", "bias") != "bias"
