"""The pruning methods of torch.nn.utils.prune for whole channels of one parameter."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from distprune._common.amount import Amount, checked_count, resolve_count, validate_amount
from distprune._common.collectives import Communicator
from distprune.call.request import Decision, PruningCall
from distprune.methods.base import BasePruningMethod
from distprune.methods.channels import (
    ChannelRows,
    ChannelSlice,
    count_live_of_channels,
    cut_channels,
    joint_norms,
    masks_without,
)
from distprune.methods.ranking import zero_lowest
from distprune.selection.keys import Order
from distprune.shards.shard import LocalShard

# Since 2.14 torch's pruning computes norms with torch.linalg: no n=None, and "fro" for any shape.
USES_VECTOR_NORM = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


def norm_decision(call: PruningCall, amount: Amount, n: float, dim: int) -> Decision:
    """Prune the channels of the smallest norm of one sharded parameter."""
    shard = call.shards[0]
    part = ChannelSlice(0, shard, checked_dim(shard, dim))
    order = norm_order(n)
    if order is None:
        raise NotImplementedError(
            f"{shard.name}: n={n!r} is not supported on a sharded parameter; expected a "
            "number, +-inf included."
        )
    dtype = call.score_or_value(0).dtype
    if not dtype.is_floating_point:
        raise NotImplementedError(
            f"{shard.name}: scores of dtype {dtype}; expected floating point."
        )

    def read() -> ChannelRows:
        given = call.scores[0] is not None
        scores = call.score_or_value(0) if given else shard.live_values()
        return part.counted_rows(scores.detach())

    rows = call.communicator.run(read)
    sizes = _sizes(part)
    norms = joint_norms([lambda: rows], order, sizes, call.communicator).to(dtype)
    if norms.isnan().any():
        raise ValueError(
            f"{shard.name}: the scores of channels {norms.isnan().nonzero().squeeze(1).tolist()} "
            f"along dim {dim} contain NaN; expected numbers."
        )
    num_live = count_live_of_channels([part], sizes, call.communicator)
    return _without_lowest_of(call, part, norms, num_live, amount)


def random_decision(call: PruningCall, amount: Amount, dim: int) -> Decision:
    """Prune random channels of one sharded parameter, the same ones as one process would.

    Every rank draws from torch's default CPU generator as one process does; the
    leader's numbers are taken.
    """
    part = ChannelSlice(0, call.shards[0], checked_dim(call.shards[0], dim))
    num_live = count_live_of_channels([part], _sizes(part), call.communicator)
    live = num_live > 0
    num_live_channels = int(live.sum())
    scores = torch.zeros(part.num_channels, dtype=torch.float32)
    if resolve_count(amount, num_live_channels):
        drawn = call.communicator.leader_of(
            num_live_channels, lambda: torch.rand(num_live_channels).view(torch.int32).long()
        )
        scores[live] = drawn.int().view(torch.float32)
    return _without_lowest_of(call, part, scores, num_live, amount)


def _sizes(part: ChannelSlice) -> Tensor:
    return torch.full((part.num_channels,), part.channel_size)


def _without_lowest_of(
    call: PruningCall, part: ChannelSlice, scores: Tensor, num_live: Tensor, amount: Amount
) -> Decision:
    """Prune the channels of the lowest scores among those of which something is left."""
    cut = cut_channels(
        scores.double().numpy(), num_live.numpy(), [part.num_channels], amount, "channels", None
    )
    return Decision(lambda: masks_without(call, [part], torch.from_numpy(cut.dropped)))


def checked_dim(t: Tensor | LocalShard, dim: int) -> int:
    """A dimension counted from the front.

    Raises:
        ValueError, TypeError, IndexError: see :func:`validate_channels` and :func:`validate_dim`.
    """
    validate_channels(t)
    validate_dim(t, dim)
    return int(dim) % len(t.shape)


def validate_channels(t: Tensor | LocalShard) -> None:
    """Raise ValueError if a tensor has fewer than two dimensions: its channels are elements."""
    if len(t.shape) <= 1:
        raise ValueError(
            f"structured pruning needs a tensor of at least two dimensions; got shape "
            f"{tuple(t.shape)}. Use an unstructured method for it."
        )


def validate_dim(t: Tensor | LocalShard, dim: int) -> None:
    """Check a dimension of a tensor.

    Raises:
        TypeError: not an int.
        IndexError: out of range at either end.
    """
    num_dims = len(t.shape)
    if not isinstance(dim, numbers.Integral):
        raise TypeError(f"dim={dim!r} is a {type(dim).__name__}; expected an int.")
    if not -num_dims <= dim < num_dims:
        raise IndexError(
            f"dim={dim} is out of range for a tensor of shape {tuple(t.shape)}; expected "
            f"{-num_dims} <= dim < {num_dims}."
        )


def norm_order(n: object) -> float | None:
    """The order of a norm that is a sum over elements; None if ``n`` names a norm of matrices.

    Raises:
        TypeError: ``n`` is None where torch's own pruning refuses it; before, None meant 2.
    """
    if n is None:
        if USES_VECTOR_NORM:
            raise TypeError(
                f"n=None: torch {torch.__version__} takes no None for the order of a norm; "
                "expected a number. Pass n=2, which None meant before torch 2.14."
            )
        return 2.0
    return float(n) if isinstance(n, numbers.Real) and not math.isnan(n) else None


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
        channel_dim = checked_dim(t, self.dim)
        k = checked_count(self.amount, t.shape[channel_dim])
        if not k:
            return default_mask
        return _without_lowest(t, channel_dim, torch.rand(t.shape[channel_dim]), k, default_mask)

    def decide(self, call: PruningCall) -> Decision:
        if type(self).compute_mask is not _BUILT_IN[RandomStructured]:
            return super().decide(call)
        return random_decision(call, self.amount, self.dim)

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
        channel_dim = checked_dim(t, self.dim)
        k = checked_count(self.amount, t.shape[channel_dim])
        norms = compute_norm(t, self.n, channel_dim)
        if not k:
            return default_mask
        return _without_lowest(t, channel_dim, norms, k, default_mask)

    def decide(self, call: PruningCall) -> Decision:
        if type(self).compute_mask is not _BUILT_IN[LnStructured]:
            return super().decide(call)
        return norm_decision(call, self.amount, self.n, self.dim)

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
    order = norm_order(n)
    if order is not None and t.is_floating_point():
        num_channels = t.shape[channel_dim]
        rows = ChannelRows(t.detach().movedim(channel_dim, 0), torch.arange(num_channels))
        sizes = torch.full((num_channels,), t.numel() // max(num_channels, 1))
        exact_norms = joint_norms([lambda: rows], order, sizes, Communicator(()))
        return exact_norms.to(device=t.device, dtype=t.dtype)
    dims = [other for other in range(t.ndim) if other != channel_dim]
    norms: Tensor
    if not USES_VECTOR_NORM:
        norms = torch.norm(t, p=n, dim=dims)
    elif n == "nuc" or (n == "fro" and len(dims) == 2):
        matrix_dims = dims if len(dims) == 2 else (-2, -1)
        norms = torch.linalg.matrix_norm(t, ord=n, dim=matrix_dims)
    else:
        norms = torch.linalg.vector_norm(t, ord=2 if n == "fro" else n, dim=dims)
    return norms


def _without_lowest(
    t: Tensor, channel_dim: int, scores: Tensor, k: int, default_mask: Tensor
) -> Tensor:
    """A mask without the ``k`` channels of the lowest scores; NaN rank last, as in torch."""
    keep = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    zero_lowest(keep, scores, k, Order.MAGNITUDE)
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
