"""The pruning methods of torch.nn.utils.prune for whole channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from distprune._common.amount import Amount, checked_count, validate_amount
from distprune._common.collectives import Communicator
from distprune.call.context import Decision, PruningCall
from distprune.methods import channels
from distprune.methods.base import BasePruningMethod


class RandomStructured(BasePruningMethod):
    """Prunes whole channels at random.

    Args:
        amount: a fraction of the channels in [0, 1], or a count.
        dim: the channels' dimension.
    """

    PRUNING_TYPE = "structured"
    READS_VALUES = False

    def __init__(self, amount: Amount, dim: int = -1) -> None:
        validate_amount(amount)
        self.amount = amount
        self.dim = dim

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Zero the channels of ``k`` smallest random numbers."""
        channel_dim = channels.checked_dim(t, self.dim)
        k = checked_count(self.amount, t.shape[channel_dim])
        if not k:
            return default_mask
        keep = channels.drop_lowest_channels(torch.rand(t.shape[channel_dim]), k)
        return _channel_mask(t, channel_dim, keep, default_mask)

    def decide(self, call: PruningCall) -> Decision:
        if type(self).compute_mask is not _BUILT_IN[RandomStructured]:
            return super().decide(call)
        return channels.random_decision(call, self.amount, self.dim)

    @classmethod
    def apply(  # type: ignore[override]
        cls, module: nn.Module, name: str, amount: Amount, dim: int = -1
    ) -> BasePruningMethod:
        """Prune channels of ``module.<name>`` at random; see :meth:`BasePruningMethod.apply`."""
        return super().apply(module, name, amount=amount, dim=dim)


class LnStructured(BasePruningMethod):
    """Prunes whole channels of smallest L_n norm; equal norms by ascending index.

    Norms are summed exactly, so that no order of summation, and no sharding, can
    change which channels go; they are rounded to the dtype of the scores.

    Args:
        amount: a fraction of the channels in [0, 1], or a count.
        n: order of the norm, as in ``torch.norm``. None is 2 before torch 2.14, and a TypeError
            since, as in torch's own pruning.
        dim: the channels' dimension.
    """

    PRUNING_TYPE = "structured"

    def __init__(self, amount: Amount, n: Any, dim: int = -1) -> None:
        validate_amount(amount)
        self.amount = amount
        self.n = n
        self.dim = dim

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Zero the ``k`` channels of smallest norm."""
        channel_dim = channels.checked_dim(t, self.dim)
        k = checked_count(self.amount, t.shape[channel_dim])
        norms = compute_norm(t, self.n, channel_dim)
        if not k:
            return default_mask
        keep = channels.drop_lowest_channels(norms, k)
        return _channel_mask(t, channel_dim, keep, default_mask)

    def decide(self, call: PruningCall) -> Decision:
        if type(self).compute_mask is not _BUILT_IN[LnStructured]:
            return super().decide(call)
        return channels.norm_decision(call, self.amount, self.n, self.dim)

    @classmethod
    def apply(  # type: ignore[override]
        cls,
        module: nn.Module,
        name: str,
        amount: Amount,
        n: Any,
        dim: int,
        importance_scores: Tensor | None = None,
    ) -> BasePruningMethod:
        """Prune channels of ``module.<name>`` by norm; see :meth:`BasePruningMethod.apply`."""
        return super().apply(
            module, name, amount=amount, n=n, dim=dim, importance_scores=importance_scores
        )


def compute_norm(t: Tensor, n: Any, dim: int) -> Tensor:
    """The L_n norm of every channel of a whole tensor, in its dtype, [t.shape[dim]].

    Orders that are not a number mean what they mean in the installed torch's pruning.

    Raises:
        TypeError: ``n`` is None and torch is 2.14 or later, or ``n`` is of no known kind.
    """
    channel_dim = dim % t.ndim
    channels.refuse_no_order(n)
    if channels.is_norm_order(n) and t.is_floating_point():
        exact_norms = channels.channel_norms(
            t.movedim(channel_dim, 0),
            2.0 if n is None else float(n),
            torch.arange(t.shape[channel_dim]),
            t.shape[channel_dim],
            t.numel() // max(t.shape[channel_dim], 1),
            Communicator(()),
        )
        return exact_norms.to(device=t.device, dtype=t.dtype)
    dims = [other for other in range(t.ndim) if other != channel_dim]
    norms: Tensor
    if not channels.USES_VECTOR_NORM:
        norms = torch.norm(t, p=n, dim=dims)
    elif n == "nuc" or (n == "fro" and len(dims) == 2):
        matrix_dims = dims if len(dims) == 2 else (-2, -1)
        norms = torch.linalg.matrix_norm(t, ord=n, dim=matrix_dims)
    else:
        norms = torch.linalg.vector_norm(t, ord=2 if n == "fro" else n, dim=dims)
    return norms


def _channel_mask(t: Tensor, channel_dim: int, keep: Tensor, default_mask: Tensor) -> Tensor:
    mask = torch.zeros_like(t)
    where: list[Any] = [slice(None)] * t.dim()
    where[channel_dim] = keep.to(t.device)
    mask[tuple(where)] = 1
    return mask.mul_(default_mask.to(dtype=mask.dtype))


# To tell whether a subclass, or an assignment to the class, replaced the mask of a method.
_BUILT_IN: dict[type[BasePruningMethod], Callable[..., Tensor]] = {
    RandomStructured: RandomStructured.compute_mask,
    LnStructured: LnStructured.compute_mask,
}
