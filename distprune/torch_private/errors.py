"""Errors that FSDP1 and FSDP2 have in common."""

from __future__ import annotations

from torch import nn

from distprune._common.pruned_form import name_without_orig


def backward_to_come(module: nn.Module, name: str) -> RuntimeError:
    """A mask would change between a forward and its backward."""
    name = name_without_orig(name)
    return RuntimeError(
        f"{type(module).__name__}.{name} was used by a forward whose backward is still to come. "
        "FSDP gathers parameters again for backward, so that gradients would mix the weights "
        "before and after this call; expected a call before the forward, or after its backward. "
        "If no backward is to come, delete what the forward returned (loss, outputs) first, or run "
        "it under torch.no_grad()."
    )
