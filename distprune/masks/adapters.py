"""Merging of adapters (PEFT) into pruned layers: refused where the result would be lost.

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
from typing import Any

from torch import nn

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
