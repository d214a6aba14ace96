"""Channels of parameters over all ranks: their norms, what is unpruned of them, which are pruned.

[Note: exact norms] A floating-point sum depends on its order, and so on the
sharding: two channels whose norms differ in the last digits could change places.
Here the terms of a channel are rounded once to a common binary grid, 62 bits wide
including room for the sum, and added as integers. Integer sums have no order, so one
process and any sharding rank the same norms.

[Note: powers] torch.pow of float64 rounds an element differently at the end of a
vector than inside of it, where the exponent is no small integer; numpy's does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from distprune.base.amount import (
    Amount,
    Bounds,
    checked_count,
)
from distprune.base.exact_sums import Normalization, power_of
from distprune.base.memory import takes_numpy
from distprune.base.naming import label_of
from distprune.call.request import LocalMasks, PruningCall
from distprune.ranks.collectives import Communicator, Op
from distprune.shards.shard import Shard

_BLOCK = 1 << 17  # elements whose float64 terms are held at a time

Unit = Literal["channels", "elements"]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ChannelRows:
    """Elements of one rank as rows that each belong to one channel.

    Attributes:
        rows: [rows, ...], floating point.
        channels: int64 [rows], the channel of each row; several may share one.
        mask: where it is 0, elements of ``rows`` count as 0; the same shape; None: all count.
    """

    rows: Tensor
    channels: Tensor
    mask: Tensor | None = None

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(|values| [rows, elements], channels), about a hundred thousand elements at a time."""
        if self.rows.numel() == 0:
            return
        height = max(1, _BLOCK * self.rows.shape[0] // self.rows.numel())
        for first in range(0, self.rows.shape[0], height):
            part = slice(first, first + height)
            block = self.rows[part].flatten(1).abs()
            if self.mask is not None:
                block = block.masked_fill(self.mask[part].flatten(1) == 0, 0.0)
            yield block, self.channels[part]


@dataclass(frozen=True)
class ChannelSlice:
    """The part that one parameter of a call has in some channels.

    Attributes:
        position: the position of the parameter in the call.
        shard: this rank's part of it.
        dim: the channels' dimension, counted from the front.
        size: indices along ``dim`` per channel.
        first: number of its first channel among those of all groups.
        is_ranked: whether its elements count for the norm.
    """

    position: int
    shard: Shard
    dim: int
    size: int = 1
    first: int = 0
    is_ranked: bool = True

    @property
    def num_channels(self) -> int:
        """Channels of the whole parameter."""
        return self.shard.shape[self.dim] // self.size

    @property
    def channel_size(self) -> int:
        """Elements of one whole channel."""
        return self.shard.numel // max(1, self.num_channels)

    def rows(self, local: Tensor) -> tuple[Tensor, Tensor]:
        """A local tensor as rows, a view, and the number of the channel of each row."""
        rows, coordinates = self.shard.channels(local, self.dim)
        rows = rows.unsqueeze(1) if rows.ndim == 1 else rows
        return rows, self.first + coordinates // self.size

    def counted_rows(self, local: Tensor, mask: Tensor | None = None) -> ChannelRows:
        """The rows of a local tensor that this rank counts: none on a further replica."""
        rows, channels = self.rows(local)
        if self.shard.replica:
            return ChannelRows(rows[:0], channels[:0])
        return ChannelRows(rows, channels, None if mask is None else self.rows(mask)[0])


# Makes the rows of one parameter; called once per read, so that one is in memory at a time.
ReadRows = Callable[[], ChannelRows]


def joint_norms(
    parts: Sequence[ReadRows], n: float, channel_sizes: Tensor, communicator: Communicator
) -> Tensor:
    """The L_n norm of every channel over all its elements, in all parameters and on all ranks.

    Args:
        parts: a local step per parameter, which may fail: what this rank counts of it.
        n: order of the norm: any number, 0 (non-zero elements) and +-inf included.
        channel_sizes: int64 [channels]: elements of each whole channel.
        communicator: the ranks that hold the parts.

    Returns:
        float64 [channels]; NaN where a channel has one, the same on every rank.

    Cost: two reads and two all-reduces of 8 bytes per channel; one of each for n = 0 and +-inf.
    """
    num_channels = channel_sizes.numel()

    def reduce_blocks(
        start: float,
        dtype: torch.dtype,
        block_result: Callable[[Tensor, Tensor], Tensor],
        combine: str,
    ) -> Tensor:
        """Per-channel reduction of this rank's blocks."""
        result = torch.full((num_channels,), start, dtype=dtype)
        for read in parts:
            for block, channels in read().blocks():
                reduced = block_result(block, channels).cpu()
                result.scatter_reduce_(0, channels, reduced, combine)
        return result

    if n == 0:
        nonzero = communicator.reduce(
            num_channels,
            lambda: reduce_blocks(
                0, torch.int64, lambda x, _: torch.count_nonzero(x, dim=1), "sum"
            ),
        )
        return nonzero.double()
    # The largest power is that of the largest element, or of the smallest.
    largest = n > 0

    def extremes() -> Tensor:
        found = reduce_blocks(
            0.0 if largest else math.inf,
            torch.float64,
            (lambda x, _: x.amax(1).double()) if largest else (lambda x, _: x.amin(1).double()),
            "amax" if largest else "amin",
        )
        # Non-negative doubles are in the order of their bits; NaN is above them, or, as -1, below.
        bits = found.view(torch.int64)
        return bits if largest else bits.masked_fill_(found.isnan(), -1)

    op: Op = "max" if largest else "min"
    extreme = communicator.reduce(num_channels, extremes, op).view(torch.float64)
    if math.isinf(n):
        return extreme
    tops = _powers(extreme, n)
    finite = tops.isfinite()
    all_finite = bool(finite.all())
    _, exponents = torch.frexp(torch.where(finite, tops, 0.0))
    # Every term is below 2**exponent; their sum on this grid stays below 2**62.
    # ceil(log2(size)), 0 of an empty channel. Exact: sizes are below 2**53.
    _, bits_of_sizes = torch.frexp((channel_sizes.clamp(min=1) - 1).double())
    shifts = 62 - bits_of_sizes - exponents.clamp(min=-900)
    grid = _power_of_two(shifts)

    def grid_sums(x: Tensor, where: Tensor) -> Tensor:
        scaled = _powers(x.double(), n) * grid[where].to(x.device).unsqueeze(1)
        if not all_finite:
            scaled.nan_to_num_(0.0, 0.0, 0.0)
        return scaled.round_().long().sum(1)

    sums = communicator.reduce(
        num_channels, lambda: reduce_blocks(0, torch.int64, grid_sums, "sum")
    )
    powers = sums.double() * _power_of_two(-shifts)
    powers = torch.where(finite, powers, tops)
    return powers.sqrt() if n == 2 else _powers(powers, 1.0 / n)


def _powers(magnitudes: Tensor, n: float) -> Tensor:
    if n == 1:
        return magnitudes
    if n == 2:
        return magnitudes * magnitudes
    if not takes_numpy(magnitudes.device):
        return magnitudes.pow(n)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        return torch.from_numpy(np.power(magnitudes.contiguous().numpy(), n))  # [Note: powers]


def _power_of_two(exponents: Tensor) -> Tensor:
    """Exact float64 powers; torch.ldexp computes them in float32."""
    return torch.from_numpy(np.ldexp(1.0, exponents.numpy()))


def count_live_of_channels(
    parts: Sequence[ChannelSlice], channel_sizes: Tensor, communicator: Communicator
) -> Tensor:
    """int64 [channels]: unpruned elements of each, over all ranks.

    Cost: a read of the masks and an all-reduce of 8 bytes per channel, if there are masks.
    """
    masked = [(part, part.shard.mask) for part in parts if part.shard.mask is not None]
    if not masked:
        return channel_sizes

    def count() -> Tensor:
        counts = torch.zeros(channel_sizes.shape, dtype=torch.int64)
        for part, mask in masked:
            of_part = part.counted_rows(mask)
            pruned = (of_part.rows == 0).flatten(1).sum(1)
            counts.index_add_(0, of_part.channels, pruned.cpu())
        return counts

    return channel_sizes - communicator.reduce(channel_sizes.numel(), count)


def masks_without(call: PruningCall, parts: Sequence[ChannelSlice], dropped: Tensor) -> LocalMasks:
    """The masks of a call without some channels; bool [channels]. A local step."""
    part_of = {part.position: part for part in parts}

    def prune(position: int, mask: Tensor) -> None:
        rows, channels = part_of[position].rows(mask)
        rows[dropped[channels].to(mask.device)] = 0

    return call.changed_masks(prune)


@dataclass(frozen=True)
class ChannelPart:
    """The part that one parameter has in the channels of a group.

    Channel c has the indices from ``c * size`` up to ``(c + 1) * size`` of ``dim``, with all
    elements there.

    Args:
        parameter: a (module, name) pair, as ``select`` lists them.
        dim: the channels' dimension: 0 for the outputs of a linear layer, 1 for its inputs.
        size: indices per channel: 1 for neurons, the size of a head for heads.
        is_ranked: whether its elements count for the norm of a channel. Those of a part that does
            not count (a bias, say) are pruned together with the others.

    Raises:
        ValueError: a size below 1.
    """

    parameter: tuple[nn.Module, str]
    dim: int
    size: int = 1
    is_ranked: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size={self.size} of {self.label}; expected 1 or more.")

    @property
    def label(self) -> str:
        """The parameter's name, for messages."""
        return label_of(self.parameter)


@dataclass(frozen=True)
class ChannelGroup:
    """Parameters whose channels go together: channel c is slice c of each part.

    Neurons of a gated MLP, and heads of an attention in which ``n`` query heads share a key-value
    head, each of ``d`` features:

        ChannelGroup([ChannelPart((mlp.gate_proj, "weight"), 0),
                      ChannelPart((mlp.up_proj, "weight"), 0),
                      ChannelPart((mlp.down_proj, "weight"), 1)])
        ChannelGroup([ChannelPart((attention.q_proj, "weight"), 0, n * d),
                      ChannelPart((attention.k_proj, "weight"), 0, d),
                      ChannelPart((attention.v_proj, "weight"), 0, d),
                      ChannelPart((attention.o_proj, "weight"), 1, n * d)])

    Args:
        parts: at least one that is ranked. All have the same number of channels.
        name: what reports, messages and bounds call it; by default the first parameter's name.

    Raises:
        ValueError: no part is ranked.
    """

    parts: Sequence[ChannelPart]
    name: str = ""

    def __post_init__(self) -> None:
        if not any(part.is_ranked for part in self.parts):
            raise ValueError(
                f"ChannelGroup {self.name or '(without a name)'} has no part that is ranked; "
                "expected one at least."
            )

    @property
    def label(self) -> str:
        """Its name, or that of its first parameter."""
        return self.name or self.parts[0].label


@dataclass(frozen=True)
class ChannelCut:
    """Which channels a call prunes.

    Attributes:
        dropped: bool [channels]: pruned by this call.
        threshold: the largest score among them; None if there are none, or with bounds.
        num_ties: channels that compete and have this score ...
        num_ties_pruned: ... and those of them that are pruned.
    """

    dropped: Flags
    threshold: float | None
    num_ties: int
    num_ties_pruned: int


def normalized(scores: Floats, live: Sequence[Flags], normalize: Normalization) -> Floats:
    """The scores of each group, divided by a statistic of its live channels.

    Args:
        scores: the scores of all groups, finite where they are live.
        live: bool, of each group: which channels compete.
        normalize: "rms", "l2" or "mean" of the scores.

    Sums are rounded once (math.fsum), so that they do not depend on an order.
    """
    divided: Floats = scores.copy()
    first = 0
    for of_group in live:
        part = divided[first : first + of_group.size]
        first += of_group.size
        terms = part[of_group]
        if not terms.size:
            continue
        # By powers of two, so that no square overflows.
        exponent = math.frexp(float(terms.max()))[1]
        terms = np.ldexp(terms, -exponent)
        power = power_of(normalize)
        total = math.fsum((terms * terms if power == 2 else terms).tolist())
        amount = total if normalize == "l2" else total / terms.size
        statistic = math.ldexp(math.sqrt(amount) if power == 2 else amount, exponent)
        if statistic:
            part /= statistic
    return divided


def cut_channels(
    scores: Floats,
    num_live: Integers,
    group_sizes: Sequence[int],
    amount: Amount,
    unit: Unit,
    bounds: Bounds | None,
) -> ChannelCut:
    """Choose the channels of the lowest scores.

    Args:
        scores: float64 [channels], no NaN where they are live.
        num_live: unpruned elements of each channel; those without any do not compete.
        group_sizes: channels of each group.
        amount: a fraction of what is live, or a count, of channels or elements.
        unit: what the amount counts. Of elements: as many channels, in their order, as fit into it.
        bounds: channels of each group that are to be pruned after the call, at least and most.

    Raises:
        ValueError: an amount of more than there is, or that the bounds do not allow.
    """
    competing = np.flatnonzero(num_live)
    order = competing[np.argsort(scores[competing], kind="stable")]
    costs = num_live if unit == "elements" else np.minimum(num_live, 1)
    k = checked_count(amount, int(costs.sum()))
    num_forced = 0
    if bounds is not None:
        forced, allowed = _within(order, group_sizes, num_live, bounds)
        order = np.concatenate([order[forced], order[allowed & ~forced]])
        num_forced = int(forced.sum())
        lowest, highest = int(costs[order[:num_forced]].sum()), int(costs[order].sum())
        if not lowest <= k <= highest:
            raise ValueError(
                f"amount={amount!r} are {k:,} {unit}, but min_sparsity needs at least {lowest:,} "
                f"and max_sparsity allows for at most {highest:,}; expected an amount between "
                "them, or other bounds."
            )
    num_dropped = int(np.searchsorted(np.cumsum(costs[order]), k, side="right"))
    chosen = order[:num_dropped]
    dropped = np.zeros(scores.size, dtype=np.bool_)
    dropped[chosen] = True
    if bounds is not None or not chosen.size:
        return ChannelCut(dropped, None, 0, 0)
    threshold = float(scores[chosen[-1]])
    return ChannelCut(
        dropped,
        threshold,
        int((scores[competing] == threshold).sum()),
        int((scores[chosen] == threshold).sum()),
    )


def _within(
    order: Integers, group_sizes: Sequence[int], num_live: Integers, bounds: Bounds
) -> tuple[Flags, Flags]:
    """Of the channels in order: which have to be pruned, and which may be; bool each."""
    ends = np.cumsum(group_sizes)
    group_of = np.searchsorted(ends, order, side="right")
    forced = np.zeros(order.size, dtype=np.bool_)
    allowed = np.zeros(order.size, dtype=np.bool_)
    by_group = np.argsort(group_of, kind="stable")
    cuts = np.searchsorted(group_of[by_group], np.arange(1, len(group_sizes)))
    parts = np.split(by_group, cuts)
    for group, (end, size, places) in enumerate(zip(ends, group_sizes, parts, strict=True)):
        num_dead = int((num_live[end - size : end] == 0).sum())
        forced[places[: max(0, bounds.lowest[group] - num_dead)]] = True
        allowed[places[: max(0, bounds.highest[group] - num_dead)]] = True
    return forced, allowed | forced
