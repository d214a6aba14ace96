"""A model as it was: its buffers and modes, kept while it is evaluated for a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from distprune._common.pruned_form import local_tensor, name_of_mask
from distprune.masks.hook import find_hook


class KeptModel:
    """Copies of a model's buffers, but for masks, and the modes of its modules.

    Cost: memory for the buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modes = [(module, module.training) for module in model.modules()]
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not _is_mask(module, name):
                    copy = local_tensor(buffer.detach()).clone()
                    self._buffers.append((module, name, buffer, copy))

    def restore_buffers(self) -> None:
        """Give every buffer the value that it had. The tensors are those that they were."""
        with torch.inference_mode(False), torch.no_grad():
            for module, name, buffer, copy in self._buffers:
                module._buffers[name] = buffer
                local_tensor(buffer.detach()).data.copy_(copy)

    def change_buffers_to_absolute_values(self) -> None:
        """Replace every floating-point buffer by its absolute values, in place."""
        with torch.inference_mode(False), torch.no_grad():
            for _, _, buffer, _ in self._buffers:
                if buffer.is_floating_point():
                    local_tensor(buffer.detach()).data.abs_()

    def restore_modes(self) -> None:
        """Give every module its mode, training or evaluation."""
        for module, is_training in self._modes:
            module.training = is_training


@contextmanager
def kept_model(model: nn.Module) -> Iterator[KeptModel]:
    """Run a block of code after which the model's buffers and modes are as they were."""
    kept = KeptModel(model)
    try:
        yield kept
    finally:
        kept.restore_modes()
        kept.restore_buffers()


def _is_mask(module: nn.Module, key: str) -> bool:
    name = name_of_mask(key)
    return name is not None and find_hook(module, name) is not None
