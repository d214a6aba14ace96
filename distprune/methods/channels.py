"""Channels of parameters over all ranks: their norms, their order, and the methods that prune them.

[Note: exact norms] A floating-point sum depends on its order, and so on the
sharding: two channels whose norms differ in the last digits could change places.
Here the terms of a channel are rounded once to a common binary grid, 62 bits wide
including room for the sum, and added as integers. Integer sums have no order, so one
process and any sharding rank the same norms.
"""

from __future__ import annotations

import math
import numbers
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distprune.base.amount import Amount, checked_count, resolve_count, validate_amount
from distprune.base.exact_sums import Normalization
from distprune.call.request import Decision, PruningCall
from distprune.methods import ranking
from distprune.methods.base import BasePruningMethod
from distprune.ranks.collectives import Communicator
from distprune.shards.shard import Shard

_BLOCK = 1 << 17  # elements whose float64 terms are held at a time

Floats = np.ndarray  # float64
Flags = np.ndarray  # bool
# Of this rank: rows [rows, ...], the channel of each, int64, and what of them counts; None: all.
Rows = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class ChannelSlice:
    """This rank's part of one parameter, as channels.

    Attributes:
        shard: the part.
        dim: the channels' dimension, counted from the front.
        size: indices along ``dim`` per channel.
        first: number of its first channel among those of all groups.
        is_ranked: whether its elements count for the norm.
    """

    shard: Shard
    dim: int
    size: int = 1
    first: int = 0
    is_ranked: bool = True

    @property
    def num_channels(self) -> int:
        """Channels of the whole parameter."""
        return self.shard.shape[self.dim] // self.size

    def rows(self, local: Tensor) -> tuple[Tensor, Tensor]:
        """A local tensor as rows, a view, and the number of the channel of each row."""
        rows, coordinates = self.shard.channels(local, self.dim)
        rows = rows.unsqueeze(1) if rows.ndim == 1 else rows
        return rows, self.first + coordinates // self.size

    @property
    def span(self) -> slice:
        """Its channels among those of all groups."""
        return slice(self.first, self.first + self.num_channels)

    def counted_rows(self, read: Callable[[], Tensor], mask: Tensor | None) -> Rows:
        """The rows of a local tensor that this rank counts: none on a further replica."""
        if self.shard.replica:
            return torch.empty(0, 1), torch.empty(0, dtype=torch.int64), None
        rows, channels = self.rows(read().detach())
        return rows, channels, None if mask is None else self.rows(mask)[0]


def channel_sizes(groups: Sequence[Sequence[ChannelSlice]]) -> Tensor:
    """int64 [channels]: elements of each whole channel, in the given parts of its group."""
    counts = torch.tensor([group[0].num_channels for group in groups])
    sizes = [sum(p.shard.numel // max(1, p.num_channels) for p in group) for group in groups]
    return torch.tensor(sizes).repeat_interleave(counts)


def joint_norms(
    parts: Sequence[Callable[[], Rows]], n: float, sizes: Tensor, communicator: Communicator
) -> Tensor:
    """The L_n norm of every channel over all its elements, in all parameters and on all ranks.

    Args:
        parts: a local step per parameter, which may fail: what this rank counts of it.
        n: order of the norm: 1, 2 or inf.
        sizes: int64 [channels]: elements of each whole channel.
        communicator: the ranks that hold the parts.

    Returns:
        float64 [channels]; NaN where a channel has one, the same on every rank.

    Cost: two reads and two all-reduces of 8 bytes per channel; one of each for n = inf.
    """

    def over_blocks(
        result: Tensor, combine: str, term: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        for read in parts:
            for block, channels in _blocks(*read()):
                result.scatter_reduce_(0, channels, term(block, channels).cpu(), combine)
        return result

    zeros = torch.zeros_like(sizes)

    def largest() -> Tensor:
        found = over_blocks(zeros.double(), "amax", lambda x, _: x.amax(1).double())
        return found.view(torch.int64)  # their order is that of the numbers; NaN is above inf

    tops = communicator.reduce(sizes.numel(), largest, "max").view(torch.float64)
    if n == math.inf:
        return tops
    tops = tops.pow(n)  # 1 or 2, exactly rounded
    finite = tops.isfinite()
    _, exponents = torch.frexp(torch.where(finite, tops, 0.0))
    # Every term is below 2**exponent; their sum on this grid stays below 2**62.
    # ceil(log2(size)), 0 of an empty channel. Exact: sizes are below 2**53.
    _, bits_of_sizes = torch.frexp((sizes.clamp(min=1) - 1).double())
    shifts = 62 - bits_of_sizes - exponents.clamp(min=-900)
    grid = _power_of_two(shifts)

    def grid_sums(x: Tensor, where: Tensor) -> Tensor:
        scaled = x.double().pow(n) * grid[where].to(x.device).unsqueeze(1)
        return scaled.nan_to_num_(0.0, 0.0, 0.0).round_().long().sum(1)

    sums = communicator.reduce(sizes.numel(), lambda: over_blocks(zeros, "sum", grid_sums))
    powers = torch.where(finite, sums.double() * _power_of_two(-shifts), tops)
    return powers.sqrt() if n == 2 else powers


def _blocks(rows: Tensor, channels: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """(|values| [rows, elements], channels), about a hundred thousand elements at a time."""
    height = max(1, _BLOCK * rows.shape[0] // max(rows.numel(), 1))
    for first in range(0, rows.shape[0] if rows.numel() else 0, height):
        part = slice(first, first + height)
        block = rows[part].flatten(1).abs()
        if mask is not None:
            block = block.masked_fill(mask[part].flatten(1) == 0, 0.0)
        yield block, channels[part]


def _power_of_two(exponents: Tensor) -> Tensor:
    """Exact float64 powers; torch.ldexp computes them in float32."""
    return torch.from_numpy(np.ldexp(1.0, exponents.numpy()))


def live_channels(
    parts: Sequence[ChannelSlice], sizes: Tensor, communicator: Communicator
) -> Flags:
    """bool [channels]: of which an element is unpruned, over all ranks.

    Cost: a read of the masks and an all-reduce of 8 bytes per channel, if there are masks.
    """
    masked = [(part, part.shard.mask) for part in parts if part.shard.mask is not None]
    if not masked:
        return sizes.numpy() > 0

    def count() -> Tensor:
        pruned = torch.zeros_like(sizes)
        for part, mask in masked:
            if not part.shard.replica:
                rows, channels = part.rows(mask)
                pruned.index_add_(0, channels, (rows == 0).flatten(1).sum(1).cpu())
        return pruned

    return (communicator.reduce(sizes.numel(), count) < sizes).numpy()


def normalized(scores: Floats, live: Flags, normalize: Normalization) -> Floats:
    """The scores of one group, divided by a statistic of its live channels, finite ones.

    Args:
        normalize: "rms", "l2" or "mean" of the scores.

    Sums are rounded once (math.fsum), so that they do not depend on an order.
    """
    terms = scores[live]
    if not terms.size:
        return scores
    # By powers of two, so that no square overflows.
    exponent = math.frexp(float(terms.max()))[1]
    terms = np.ldexp(terms, -exponent)
    total = math.fsum((terms if normalize == "mean" else terms * terms).tolist())
    amount = total if normalize == "l2" else total / terms.size
    statistic = math.ldexp(amount if normalize == "mean" else math.sqrt(amount), exponent)
    return scores / statistic if statistic else scores


def prune_lowest(
    call: PruningCall, parts: Sequence[ChannelSlice], scores: Floats, live: Flags, amount: Amount
) -> tuple[Decision, Flags]:
    """Prune the live channels of the lowest scores, by (score, number); and which these are.

    Args:
        parts: of every parameter of the call.
        scores: float64 [channels], no NaN where they are live; the same on all ranks.
        live: bool [channels]: which channels compete.
        amount: a fraction of them, or a count.

    Raises:
        ValueError: a count of more than compete.
    """
    competing = np.flatnonzero(live)
    order = competing[np.argsort(scores[competing], kind="stable")]
    chosen = order[: checked_count(amount, order.size)]
    pruned = np.zeros(live.size, dtype=bool)
    pruned[chosen] = True
    dropped = torch.from_numpy(pruned)

    def prune(position: int, mask: Tensor) -> None:
        rows, channels = parts[position].rows(mask)
        rows[dropped[channels].to(mask.device)] = 0

    threshold = float(scores[chosen[-1]]) if chosen.size else None
    ties = scores == threshold
    decision = Decision(
        lambda: call.changed_masks(prune),
        threshold=threshold,
        num_ties=int((ties & live).sum()),
        num_ties_pruned=int((ties & pruned).sum()),
    )
    return decision, pruned


class _Structured(BasePruningMethod):
    """What methods have in common that prune the channels of the lowest scores.

    Attributes:
        amount: a fraction of the channels in [0, 1], or a count.
        dim: the channels' dimension.
    """

    PRUNING_TYPE = "structured"

    def __init__(self, amount: Amount, dim: int = -1) -> None:
        validate_amount(amount)
        self.amount = amount
        self.dim = dim

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Zero the ``k`` channels of the lowest scores; NaN rank last, as in torch."""
        dim = checked_dim(t, self.dim)
        k = checked_count(self.amount, t.shape[dim])
        scores = self._whole_scores(t, dim)  # also for k=0: a wrong n is an error
        if not k:
            return default_mask
        keep = torch.ones_like(scores, dtype=torch.bool)
        ranking.zero_lowest(keep, scores, k)
        keep = keep.to(t.device).view(-1, *[1] * (t.dim() - dim - 1))
        return (keep * default_mask).to(t.dtype)

    def decide(self, call: PruningCall) -> Decision:
        part = ChannelSlice(call.shards[0], checked_dim(call.shards[0], self.dim))
        sizes = channel_sizes([[part]])
        live = live_channels([part], sizes, call.communicator)
        scores = self._scores(call, part, sizes, live)
        return prune_lowest(call, [part], scores, live, self.amount)[0]

    @abstractmethod
    def _whole_scores(self, t: Tensor, dim: int) -> Tensor:
        """The scores of the channels of a whole tensor."""

    @abstractmethod
    def _scores(self, call: PruningCall, part: ChannelSlice, sizes: Tensor, live: Flags) -> Floats:
        """The scores of all channels, the same on every rank. Collective."""


class RandomStructured(_Structured):
    """Prunes whole channels at random.

    Args:
        amount: a fraction of the channels in [0, 1], or a count.
        dim: the channels' dimension.
    """

    READS_VALUES = False

    def _whole_scores(self, t: Tensor, dim: int) -> Tensor:
        return torch.rand(t.shape[dim] if resolve_count(self.amount, t.shape[dim]) else 0)

    def _scores(self, call: PruningCall, part: ChannelSlice, sizes: Tensor, live: Flags) -> Floats:
        scores, num_live = np.zeros(part.num_channels), int(live.sum())
        if resolve_count(self.amount, num_live):
            # All ranks draw from torch's CPU generator, as one process does; the leader's count.
            drawn = call.communicator.leader_of(
                num_live, lambda: torch.rand(num_live).view(torch.int32).long()
            )
            scores[live] = drawn.int().view(torch.float32).numpy()
        return scores

    @classmethod
    def apply(  # type: ignore[override]
        cls, module: nn.Module, name: str, amount: Amount, dim: int = -1
    ) -> BasePruningMethod:
        """Prune channels of ``module.<name>`` at random; see :meth:`BasePruningMethod.apply`."""
        return super().apply(module, name, amount=amount, dim=dim)


class LnStructured(_Structured):
    """Prunes whole channels of smallest L_n norm; equal norms by ascending index.

    Norms are summed exactly, so that no order of summation, and no sharding, can
    change which channels go; they are rounded to the dtype of the scores.

    Args:
        amount: a fraction of the channels in [0, 1], or a count.
        n: order of the norm, as in ``torch.norm``; None is 2.
        dim: the channels' dimension.
    """

    def __init__(self, amount: Amount, n: Any, dim: int = -1) -> None:
        super().__init__(amount, dim)
        self.n = n

    def _whole_scores(self, t: Tensor, dim: int) -> Tensor:
        return compute_norm(t, self.n, dim)

    def _scores(self, call: PruningCall, part: ChannelSlice, sizes: Tensor, live: Flags) -> Floats:
        order, values, label = norm_order(self.n), call.score_or_value(0), part.shard.name
        if order is None or not values.dtype.is_floating_point:
            text = f"{label}: n={self.n!r} of {values.dtype} is not supported on shards; expected "
            raise NotImplementedError(text + "1, 2 or inf, and floating-point scores.")
        mask = part.shard.mask if part.shard.scores is None else None
        rows = partial(part.counted_rows, lambda: values, mask)
        norms = joint_norms([rows], order, sizes, call.communicator).to(values.dtype)
        wrong = norms.isnan().nonzero().view(-1).tolist()
        if wrong:
            raise ValueError(f"{label}: scores of channels {wrong} along dim {self.dim} are NaN.")
        return norms.double().numpy()

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


def checked_dim(t: Tensor | Shard, dim: int) -> int:
    """A dimension counted from the front.

    Raises:
        ValueError, TypeError, IndexError: see :func:`validate_channels` and :func:`validate_dim`.
    """
    validate_channels(t)
    validate_dim(t, dim)
    return int(dim) % len(t.shape)


def validate_channels(t: Tensor | Shard) -> None:
    """Raise ValueError if a tensor has fewer than two dimensions: its channels are elements."""
    if len(t.shape) <= 1:
        raise ValueError(f"shape {tuple(t.shape)} has no channels; use an unstructured method.")


def validate_dim(t: Tensor | Shard, dim: int) -> None:
    """Check a dimension of a tensor.

    Raises:
        TypeError: not an int.
        IndexError: out of range at either end.
    """
    num_dims = len(t.shape)
    if not isinstance(dim, numbers.Integral):
        raise TypeError(f"dim={dim!r} is a {type(dim).__name__}; expected an int.")
    if not -num_dims <= dim < num_dims:
        raise IndexError(f"dim={dim} is out of range for a tensor of shape {tuple(t.shape)}.")


def norm_order(n: object) -> float | None:
    """The order of a norm that is summed exactly: 1, 2 (also for None) or inf; else None."""
    if n is None:
        return 2.0
    return float(n) if n in (1, 2, math.inf) else None  # type: ignore[arg-type]


def compute_norm(t: Tensor, n: Any, dim: int) -> Tensor:
    """The L_n norm of every channel of a whole tensor, in its dtype, [t.shape[dim]]."""
    dim %= t.ndim
    order = norm_order(n)
    if order is None or not t.is_floating_point():
        return torch.norm(t, p=n, dim=[other for other in range(t.ndim) if other != dim])
    rows = t.detach().movedim(dim, 0), torch.arange(t.shape[dim]), None
    sizes = torch.full((t.shape[dim],), t.numel() // max(t.shape[dim], 1))
    return joint_norms([lambda: rows], order, sizes, Communicator(())).to(t.device, t.dtype)
