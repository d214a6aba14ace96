"""Comparisons of this rank's values with a reference; each returns a list of problems."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distprune._common.pruned_form import mask_key
from distprune.selftest.models import WEIGHTS, local_values, weights_of

_RTOL, _ATOL = 1e-4, 1e-5  # for sums, whose order depends on the ranks


def whole_weights(model: nn.Module) -> list[np.ndarray]:
    """Copies of the weights of a model that is not wrapped."""
    return [model.get_parameter(name).detach().clone().cpu().numpy() for name in WEIGHTS]


def wrong_masks(
    model: nn.Module, keeps: list[np.ndarray], indices: list[np.ndarray], when: str
) -> list[str]:
    """Compare this rank's masks with its parts of the whole masks, bit for bit."""
    wrong = []
    pairs = weights_of(model)
    for label, (module, name), keep, parts in zip(WEIGHTS, pairs, keeps, indices, strict=True):
        if not hasattr(module, mask_key(name)):
            wrong.append(f"{when}: {label} has no mask")
            continue
        mask, expected = local_values(module, mask_key(name)), keep.reshape(-1)[parts]
        if mask.shape != expected.shape:
            wrong.append(
                f"{when}: the mask of {label} has shape {mask.shape}, expected {expected.shape}"
            )
            continue
        differs = (mask != 0) != expected
        if differs.any():
            wrong.append(
                f"{when}: {int(differs.sum())} of {differs.size} mask elements of {label} on this "
                f"rank differ from the reference, the first at index {int(parts[differs][0])} of "
                "the whole parameter"
            )
    return wrong


def masked_output(dense: nn.Module, masks: dict[str, Tensor], batch: Tensor) -> Tensor:
    """The output of a dense model whose weights are multiplied by masks."""
    masked = {name: dense.get_parameter(name) * mask for name, mask in masks.items()}
    output: Tensor = torch.func.functional_call(dense, masked, (batch,))
    return output


def far(what: str, actual: Any, expected: Any) -> list[str]:
    """A problem if two arrays differ by more than rounding."""
    actual, expected = (
        values.detach().cpu().numpy() if isinstance(values, Tensor) else values
        for values in (actual, expected)
    )
    if actual.shape != expected.shape:
        return [f"{what} has shape {actual.shape}, expected {expected.shape}"]
    if np.allclose(actual, expected, rtol=_RTOL, atol=_ATOL):
        return []
    distance = float(np.abs(actual - expected).max())
    return [f"{what} differs from the reference by up to {distance:.3g}"]


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything that a pruning may change, for comparison with ==."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        state[name] = [*module._parameters, *module._buffers, *module._forward_pre_hooks]
    for module, name in weights_of(model):
        if hasattr(module, name):
            state[f"{id(module)} {name}"] = local_values(module, name).tobytes()
    return state


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Counts the collectives that the dispatcher runs, and the bytes of their tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_calls = self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if "c10d" in func.namespace and name not in ("wait_tensor", "monitored_barrier_"):
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.num_calls += 1
            self.num_bytes += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))
