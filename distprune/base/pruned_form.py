"""The pruned form of a parameter: the names under which it is kept, and the masked value.

A plain module whose parameter ``weight`` is pruned has, as in ``torch.nn.utils.prune``:

    weight_orig    the Parameter, unmasked           "weight" + ORIG
    weight_mask    a buffer, 1 or True = keep        "weight" + MASK
    weight         the product of both               masked_product(original, mask)

State dicts have the first two, with the module's path in front. Where the parameter is sharded,
``weight`` is the Parameter, with zeros, beside ``weight_mask``. Every other module takes these
names from here. Importing this module does not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Container
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

# What follows the name of a pruned parameter: that of the unmasked one, and that of the mask.
ORIG, MASK = "_orig", "_mask"


def name_of_mask(key: str) -> str | None:
    """The parameter's name if ``key`` is one of a mask; else None."""
    return key.removesuffix(MASK) if key.endswith(MASK) else None


def stored_key(name: str, keys: Container[str]) -> str:
    """The key of the values of the pruned parameter ``name``: ``name_orig`` if there is one."""
    return name + ORIG if name + ORIG in keys else name


def name_of_pruned_orig(key: str, keys: Container[str]) -> str | None:
    """The parameter's name if ``key`` is its ``_orig`` and ``keys`` has its mask; else None."""
    name = key.removesuffix(ORIG)
    return name if name != key and name + MASK in keys else None


def name_of_pruned_mask(key: str, keys: Container[str]) -> str | None:
    """The parameter's name if ``key`` is its mask and ``keys`` has its values; else None."""
    name = name_of_mask(key)
    return name if name is not None and stored_key(name, keys) in keys else None


def masked_product(original: Tensor, mask: Tensor) -> Tensor:
    """``mask * original`` in the dtype of ``original``, as ``torch.nn.utils.prune`` computes it.

    Pruned elements keep their sign (-0.0), and inf becomes NaN.
    """
    if is_dtensor(mask) and not is_dtensor(original):
        # transformers registers local tensors while the experts of an expert-parallel model run.
        mask = mask.to_local()
    if mask.dtype == original.dtype:
        return mask * original
    import torch

    if mask.dtype == torch.bool:
        return mask * original  # autograd keeps the mask, and no copy of it in another dtype
    return mask.to(dtype=original.dtype) * original


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Whether a value is a DTensor. Does not import DTensor: then there is none."""
    name = "torch.distributed.tensor"
    return name in sys.modules and isinstance(value, sys.modules[name].DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def lost_mask(module: nn.Module, name: str) -> RuntimeError:
    """The error for a pruned parameter whose mask buffer was deleted, or set to None."""
    key = name + MASK
    return RuntimeError(
        f"{type(module).__name__}.{name} is pruned, and its mask is gone: the buffer {key} was "
        "deleted, or set to None. Convert a model after distprune.remove. Else put the mask back "
        f"(module.register_buffer({key!r}, mask)), or load a checkpoint that has it."
    )
