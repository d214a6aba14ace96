"""The buffers of a model that its checkpoints hold."""

from __future__ import annotations

from torch import Tensor, nn

from distprune._common.naming import full_name, named_modules
from distprune._common.pruned_form import local_tensor, name_of_mask
from distprune.masks.hook import find_hook


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers by their full names, without masks; the same on every rank."""
    found: dict[str, Tensor] = {}
    for path, module in named_modules(model):
        for name, buffer in module._buffers.items():
            masked = name_of_mask(name)
            is_mask = masked is not None and find_hook(module, masked) is not None
            if buffer is None or is_mask or name in module._non_persistent_buffers_set:
                continue
            found[full_name(path, name)] = local_tensor(buffer)
    return found
