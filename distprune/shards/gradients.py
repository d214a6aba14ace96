"""This rank's part of a parameter's gradient, whatever keeps it."""

from __future__ import annotations

import torch
from torch import Tensor

from distprune._common.pruned_form import is_dtensor
from distprune.shards.shard import LocalShard
from distprune.torch_private.managed import Managed


def requires_grad(shard: LocalShard, managed: Managed | None) -> bool:
    """Whether a backward gives the parameter a gradient: false of a frozen one."""
    return shard.parameter.requires_grad if managed is None else managed.requires_grad


def local_gradient(shard: LocalShard, managed: Managed | None) -> Tensor:
    """This rank's part of ``.grad``, laid out like ``shard.values``; not a copy.

    Args:
        shard: the parameter.
        managed: a wrapper's record of it, if it has one.

    Raises:
        RuntimeError: there is no gradient, or it is not complete yet; names the parameter.
        NotImplementedError: a gradient of another layout than the parameter's.
    """
    if managed is not None and managed.has_unreduced_gradient:
        raise RuntimeError(
            f"{shard.name}: a backward without gradient synchronisation (no_sync, "
            "set_requires_gradient_sync(False)) left gradients that the ranks have not reduced "
            "yet; expected a call after the last backward of a step, which reduces them."
        )
    gradient = available_gradient(shard, managed)
    if gradient is None:
        raise RuntimeError(
            f"{shard.name} has no gradient; expected a call after backward() and before "
            "zero_grad(). If the loss does not depend on this parameter, leave it out."
        )
    return gradient


def available_gradient(shard: LocalShard, managed: Managed | None) -> Tensor | None:
    """This rank's part of what ``.grad`` has, laid out like ``shard.values``, or None.

    Raises:
        NotImplementedError: a gradient of another layout than the parameter's.
    """
    if not shard.values.numel():
        return shard.values
    gradient = shard.parameter.grad if managed is None else managed.gradient
    if gradient is None:
        return None
    if is_dtensor(gradient):
        if gradient.placements != shard.placements or gradient.device_mesh != shard.mesh:
            raise NotImplementedError(
                f"{shard.name}: its gradient has placements {tuple(gradient.placements)}, and the "
                f"parameter {shard.placements}; expected the same. Assign "
                ".grad.redistribute(placements=parameter.placements) to .grad first."
            )
        with torch.no_grad():
            gradient = gradient.to_local()
    if gradient.layout is not torch.strided:
        raise NotImplementedError(
            f"{shard.name}: its gradient has layout {gradient.layout}; expected a dense one. Make "
            "the embedding with sparse=False."
        )
    return gradient.detach()


def drop_gradient(shard: LocalShard, managed: Managed | None) -> None:
    """Set ``.grad`` to None; of a parameter of FSDP1 those of its whole flat parameter."""
    if managed is None:
        shard.parameter.grad = None
    else:
        managed.drop_gradient()
