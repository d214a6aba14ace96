"""The error for a mask buffer that other code has deleted."""

from __future__ import annotations

from torch import nn

from distprune._common.pruned_form import mask_key, orig_key


def lost_mask(module: nn.Module, name: str) -> RuntimeError:
    """The error for a pruned parameter whose mask buffer was deleted, or set to None."""
    key = mask_key(name)
    return RuntimeError(
        f"{type(module).__name__}.{name} is pruned, and its mask is gone: something deleted the "
        f"buffer {key}, or set it to None; expected a tensor like {orig_key(name)}. Put the mask "
        f"back (module.register_buffer({key!r}, mask)), or load a checkpoint that has it."
    )
