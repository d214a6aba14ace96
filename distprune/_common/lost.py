"""What to say where a mask is gone that nobody but the library should have deleted."""

from __future__ import annotations

from torch import nn


def lost_mask(module: nn.Module, name: str) -> RuntimeError:
    """The error for a pruned parameter whose mask buffer was deleted, or set to None."""
    return RuntimeError(
        f"{type(module).__name__}.{name} is pruned, and its mask is gone: something deleted the "
        f"buffer {name}_mask, or set it to None; expected a tensor like {name}_orig. Put the mask "
        f"back (module.register_buffer('{name}_mask', mask)), or load a checkpoint that has it."
    )
