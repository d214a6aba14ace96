"""A model as it was: its buffers and modes, kept while it is evaluated for a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from distprune._common.naming import Pair, named_modules
from distprune._common.pruned_form import local_tensor, name_of_mask, name_of_pruned_orig
from distprune.masks.hook import find_hook
from distprune.torch_private.wrapper import is_flattened, managed_parameters


def all_parameters(model: nn.Module) -> list[Pair]:
    """Every (module, name) of a parameter of a model, wrapped or not, pruned or not."""
    registered: dict[int, list[str]] = {}
    managed = managed_parameters(model)
    for module_id, key in managed:
        registered.setdefault(module_id, []).append(key)
    places = []
    for _, module in named_modules(model):
        own = [key for key, value in module._parameters.items() if value is not None]
        for key in dict.fromkeys([*own, *registered.get(id(module), ())]):
            if (id(module), key) not in managed and is_flattened(module, key):
                continue  # a flat parameter of FSDP1: its pieces are listed
            places.append((module, name_of_pruned_orig(key, _mask_keys(module)) or key))
    return places


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


def _mask_keys(module: nn.Module) -> list[str]:
    return [key for key in module._buffers if _is_mask(module, key)]


def _is_mask(module: nn.Module, key: str) -> bool:
    name = name_of_mask(key)
    return name is not None and find_hook(module, name) is not None
