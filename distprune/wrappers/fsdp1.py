"""FSDP1 (``FullyShardedDataParallel``): the only file that knows its private fields."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter

_MANAGED = "_fsdp_flattened"


def is_managed(module: nn.Module, name: str) -> bool:
    """Whether a parameter is a piece of an FSDP1 flat parameter."""
    registered = module._parameters.get(name)
    if registered is not None:
        return isinstance(registered, FlatParameter) or getattr(registered, _MANAGED, False)
    # use_orig_params=False leaves a view of the flat parameter as a plain attribute.
    view = module.__dict__.get(name)
    base = view._base if isinstance(view, Tensor) else None
    return isinstance(base, FlatParameter) or getattr(base, _MANAGED, False)
