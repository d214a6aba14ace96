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
from distprune.call.request import Decision, LocalMasks, PruningCall
from distprune.methods.base import BasePruningMethod
from distprune.methods.channel_norms import ChannelRows, joint_norms
from distprune.methods.ranking import zero_lowest
from distprune.selection.keys import Order
from distprune.selection.passes import count_live
from distprune.shards.shard import LocalShard

# Since 2.14 torch's pruning computes norms with torch.linalg: no n=None, and "fro" for any shape.
USES_VECTOR_NORM = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


def channel_norms(
    rows: Tensor,
    n: float,
    coordinates: Tensor,
    num_channels: int,
    channel_size: int,
    communicator: Communicator,
    *,
    counted: bool = True,
) -> Tensor:
    """The L_n norm of every channel along a dimension, over all ranks.

    Args:
        rows: this rank's part, [rows, ...], floating point.
        n: order of the norm: any number, 0 (non-zero elements) and +-inf included.
        coordinates: int64 [rows], the channel of each row; several may share one.
        num_channels: over all ranks.
        channel_size: elements of one whole channel.
        communicator: the ranks that hold the parts.
        counted: False on a rank whose elements another rank counts.

    Returns:
        float64 [num_channels]; NaN where a channel has one, the same on every rank.

    Cost: two reads; two all-reduces of 8 bytes per channel. See channel_norms.[Note: exact norms].
    """
    counted_rows = rows.detach() if counted else rows[:0]
    part = ChannelRows(counted_rows, coordinates[: counted_rows.shape[0]])
    sizes = torch.full((num_channels,), channel_size)
    return joint_norms([lambda: part], n, sizes, communicator)


def norm_decision(call: PruningCall, amount: Amount, n: float, dim: int) -> Decision:
    """Prune the channels of the smallest norm of one sharded parameter."""
    shard = call.shards[0]
    channel_dim = checked_dim(shard, dim)
    refuse_no_order(n)
    if not is_norm_order(n):
        raise NotImplementedError(
            f"{shard.name}: n={n!r} is not supported on a sharded parameter; expected a "
            "number, +-inf included."
        )
    dtype = call.score_or_value(0).dtype
    if not dtype.is_floating_point:
        raise NotImplementedError(
            f"{shard.name}: scores of dtype {dtype}; expected floating point."
        )
    rows, coordinates = call.communicator.run(
        lambda: shard.channels(
            shard.live_values() if call.scores[0] is None else call.score_or_value(0), channel_dim
        )
    )
    norms = channel_norms(
        rows,
        2.0 if n is None else float(n),
        coordinates,
        shard.shape[channel_dim],
        shard.numel // max(shard.shape[channel_dim], 1),
        call.communicator,
        counted=shard.replica == 0,
    ).to(dtype)
    if norms.isnan().any():
        raise ValueError(
            f"{shard.name}: the scores of channels {norms.isnan().nonzero().squeeze(1).tolist()} "
            f"along dim {dim} contain NaN; expected numbers."
        )
    return _cut_channels(call, amount, channel_dim, norms)


def random_decision(call: PruningCall, amount: Amount, dim: int) -> Decision:
    """Prune random channels of one sharded parameter, the same ones as one process would.

    Every rank draws from torch's default CPU generator as one process does; the
    leader's numbers are taken.
    """
    shard = call.shards[0]
    channel_dim = checked_dim(shard, dim)
    live = _live_channels(call, channel_dim)
    num_live_channels = int(live.sum())
    scores = torch.zeros(shard.shape[channel_dim], dtype=torch.float32)
    if resolve_count(amount, num_live_channels):
        drawn = call.communicator.leader_of(
            num_live_channels, lambda: torch.rand(num_live_channels).view(torch.int32).long()
        )
        scores[live] = drawn.int().view(torch.float32)
    return _cut_channels(call, amount, channel_dim, scores, live)


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


def refuse_no_order(n: object) -> None:
    """Raise TypeError for n=None where torch's own pruning does; before, None meant 2."""
    if n is None and USES_VECTOR_NORM:
        raise TypeError(
            f"n=None: torch {torch.__version__} takes no None for the order of a norm; expected a "
            "number. Pass n=2, which None meant before torch 2.14."
        )


def is_norm_order(n: object) -> bool:
    """Whether torch.norm of this order is a sum over elements (None: 2), not of a matrix."""
    return n is None or (isinstance(n, numbers.Real) and not math.isnan(n))


def drop_lowest_channels(norms: Tensor, amount: Amount) -> Tensor:
    """bool [channels], True = keep: all but the smallest norms, ties to the lower index."""
    k = checked_count(amount, norms.numel())
    keep = torch.ones(norms.shape, dtype=torch.bool, device=norms.device)
    zero_lowest(keep, norms, k, Order.MAGNITUDE)
    return keep


def _cut_channels(
    call: PruningCall, amount: Amount, channel_dim: int, norms: Tensor, live: Tensor | None = None
) -> Decision:
    shard = call.shards[0]
    live = _live_channels(call, channel_dim) if live is None else live
    keep = live.clone()
    keep[live] = drop_lowest_channels(norms[live], amount)

    def finish() -> LocalMasks:
        mask = call.start_mask(0)
        flat = shard.flat(mask)
        num_live = count_live(flat, shard.counted)
        rows, coordinates = shard.channels(mask, channel_dim)
        # Channels that were dead already keep what they have.
        rows[(live & ~keep)[coordinates].to(mask.device)] = 0
        return LocalMasks([mask], [num_live - count_live(flat, shard.counted)])

    return Decision(finish)


def _live_channels(call: PruningCall, channel_dim: int) -> Tensor:
    """bool [channels]: which still have an unpruned element, on any rank."""
    shard = call.shards[0]
    mask = shard.mask
    if mask is None:
        return torch.ones(shard.shape[channel_dim], dtype=torch.bool)

    def count() -> Tensor:
        counts = torch.zeros(shard.shape[channel_dim], dtype=torch.int64)
        rows, coordinates = shard.channels(mask, channel_dim)
        return counts.index_add_(0, coordinates, torch.count_nonzero(rows.flatten(1), dim=1).cpu())

    return call.communicator.reduce(shard.shape[channel_dim], count) > 0


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
        keep = drop_lowest_channels(torch.rand(t.shape[channel_dim]), k)
        return _channel_mask(t, channel_dim, keep, default_mask)

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
        keep = drop_lowest_channels(norms, k)
        return _channel_mask(t, channel_dim, keep, default_mask)

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
    refuse_no_order(n)
    if is_norm_order(n) and t.is_floating_point():
        exact_norms = channel_norms(
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
    if not USES_VECTOR_NORM:
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
