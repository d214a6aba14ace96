"""The decision of ``global_structured``: whole channels, ranked over all groups and ranks.

Channels are numbered group by group, so that the order (score, group, index) is that of (score,
number). All ranks cut it alike, because all have the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distprune._common.amount import (
    Amount,
    Bounded,
    Bounds,
    SparsityBound,
    checked_count,
    collapsed,
    is_nearly_empty,
    to_bounds,
)
from distprune._common.exact_sums import Normalization, power_of
from distprune.call.report import ChannelGroupReport
from distprune.call.request import Decision, PruningCall
from distprune.methods.channels import (
    ChannelGroup,
    ChannelPart,
    ChannelRows,
    ChannelSlice,
    count_live_of_channels,
    joint_norms,
    masks_without,
)
from distprune.shards.shard import LocalShard

Unit = Literal["channels", "elements"]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


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


_SHOWN = 5


@dataclass
class GlobalStructured:
    """Prunes the channels of the lowest norms; see request.DecidesMasks.

    Attributes:
        groups: the caller's. Part i of all groups together is parameter i of the call.
        amount, n, unit, normalize, min_sparsity, max_sparsity: as for ``global_structured``.
        reports: what was decided of each group, once it has decided ...
        collapsed: ... and the names of the groups of which hardly anything is left.
    """

    groups: Sequence[ChannelGroup]
    amount: Amount
    n: float
    unit: Unit
    normalize: Normalization | None
    min_sparsity: SparsityBound | None
    max_sparsity: SparsityBound | None
    reports: list[ChannelGroupReport] = field(default_factory=list)
    collapsed: list[str] = field(default_factory=list)

    READS_VALUES = True

    def decide(self, call: PruningCall) -> Decision:
        by_group = _laid_out(self.groups, call)
        parts = [part for of_group in by_group for part in of_group]
        group_sizes = [of_group[0].num_channels for of_group in by_group]
        bounds = self._agree_on_bounds(call, group_sizes)
        sizes = _channel_sizes(by_group)
        num_live = count_live_of_channels(parts, sizes, call.communicator)
        ranked = [[part for part in of_group if part.is_ranked] for of_group in by_group]
        norms = joint_norms(
            [partial(_read, call, part) for of_group in ranked for part in of_group],
            self.n,
            _channel_sizes(ranked),
            call.communicator,
        )
        names = [group.label for group in self.groups]
        # From here to the masks every rank does the same with the same numbers.
        scores, live = norms.numpy(), num_live.numpy() > 0
        _refuse(np.isnan(scores) & live, "contain NaN; expected numbers", names, group_sizes)
        if self.normalize is not None:
            what = f"are infinite, which normalize={self.normalize!r} cannot divide"
            _refuse(np.isinf(scores) & live, what, names, group_sizes)
            ends = np.cumsum(group_sizes)[:-1]
            scores = normalized(scores, np.split(live, ends), self.normalize)
        cut = cut_channels(scores, num_live.numpy(), group_sizes, self.amount, self.unit, bounds)
        self._report(names, group_sizes, live, cut, sizes, bounds)
        return Decision(
            lambda: masks_without(call, parts, torch.from_numpy(cut.dropped)),
            threshold=cut.threshold,
            num_ties=cut.num_ties,
            num_ties_pruned=cut.num_ties_pruned,
        )

    def _agree_on_bounds(self, call: PruningCall, group_sizes: Sequence[int]) -> Bounds | None:
        if self.min_sparsity is None and self.max_sparsity is None:
            return None
        bounded = [
            Bounded(group.label, (group.label,), size, (size,))
            for group, size in zip(self.groups, group_sizes, strict=True)
        ]
        return call.communicator.run(
            lambda: to_bounds(bounded, self.min_sparsity, self.max_sparsity),
            lambda bounds: [("bounds of the groups", str(bounds))],
        )

    def _report(
        self,
        names: Sequence[str],
        group_sizes: Sequence[int],
        live: Flags,
        cut: ChannelCut,
        sizes: Tensor,
        bounds: Bounds | None,
    ) -> None:
        self.reports, first = [], 0
        for name, size in zip(names, group_sizes, strict=True):
            of_group = slice(first, first + size)
            self.reports.append(
                ChannelGroupReport(
                    name,
                    size,
                    size - int(live[of_group].sum()),
                    int(cut.dropped[of_group].sum()),
                    int(sizes[first]) if size else 0,
                )
            )
            first += size
        emptied = collapsed([(group.num_channels, group.num_pruned) for group in self.reports])
        floors = [0] * len(names) if bounds is None else bounds.lowest
        self.collapsed = [
            names[i]
            for i in emptied
            # Not by an earlier call, and not because the caller asked for it.
            if self.reports[i].num_pruned_now
            and not is_nearly_empty(
                group_sizes[i], max(floors[i], self.reports[i].num_pruned_before)
            )
        ]


def _laid_out(groups: Sequence[ChannelGroup], call: PruningCall) -> list[list[ChannelSlice]]:
    """By group, its parts in the parameters of the call; checked."""
    by_group: list[list[ChannelSlice]] = []
    positions, first = iter(range(len(call.shards))), 0
    for group in groups:
        parts = []
        for part in group.parts:
            position = next(positions)
            shard = call.shards[position]
            dim = _checked_dim(part, shard)
            if shard.shape[dim] % part.size:
                raise ValueError(
                    f"{shard.name} in group {group.label}: {shard.shape[dim]} indices along dim "
                    f"{part.dim}; expected a multiple of size={part.size}."
                )
            parts.append(ChannelSlice(position, shard, dim, part.size, first, part.is_ranked))
        if len({part.num_channels for part in parts}) > 1:
            each = ", ".join(
                f"{part.num_channels} of {part.shard.name} ({part.shard.shape[part.dim]} indices "
                f"along dim {given.dim}, size={part.size})"
                for part, given in zip(parts, group.parts, strict=True)
            )
            raise ValueError(
                f"the parts of group {group.label} have different numbers of channels: {each}; "
                "expected the same. Check dim and size of each part."
            )
        _check_scores(group, parts, call)
        by_group.append(parts)
        first += parts[0].num_channels
    return by_group


def _checked_dim(part: ChannelPart, shard: LocalShard) -> int:
    ndim = len(shard.shape)
    if not -ndim <= part.dim < ndim:
        raise IndexError(
            f"{shard.name}: dim={part.dim} is out of range for a parameter of shape "
            f"{tuple(shard.shape)}; expected {-ndim} <= dim < {ndim}."
        )
    return part.dim % ndim


def _check_scores(group: ChannelGroup, parts: Sequence[ChannelSlice], call: PruningCall) -> None:
    ranked = [part for part in parts if part.is_ranked]
    missing = [part.shard.name for part in ranked if call.scores[part.position] is None]
    if missing and len(missing) < len(ranked):
        raise ValueError(
            f"importance_scores has scores of some parameters of group {group.label}, and none "
            f"of {', '.join(missing)}; expected scores of all that are ranked, or of none. "
            "is_ranked=False leaves a part out of the norm."
        )
    for part in ranked:
        scores = call.scores[part.position]
        tensor = scores if isinstance(scores, Tensor) else part.shard.values
        if not tensor.dtype.is_floating_point:
            raise NotImplementedError(
                f"{part.shard.name}: scores of dtype {tensor.dtype}; expected floating point."
            )


def _channel_sizes(by_group: Sequence[Sequence[ChannelSlice]]) -> Tensor:
    """int64 [channels]: elements of each whole channel, in the given parts of its group."""
    sizes = torch.tensor([sum(part.channel_size for part in parts) for parts in by_group])
    return sizes.repeat_interleave(torch.tensor([parts[0].num_channels for parts in by_group]))


def _read(call: PruningCall, part: ChannelSlice) -> ChannelRows:
    return part.counted_rows(call.score_or_value(part.position).detach(), part.shard.mask)


def _refuse(wrong: Flags, what: str, names: Sequence[str], group_sizes: Sequence[int]) -> None:
    """Raise ValueError with the names and channels of scores that are wrong."""
    if not wrong.any():
        return
    ends = np.cumsum(group_sizes)[:-1]
    bad = [
        (name, np.flatnonzero(of_group).tolist())
        for name, of_group in zip(names, np.split(wrong, ends), strict=True)
        if of_group.any()
    ]
    shown = "; ".join(
        f"{name}, channels {', '.join(map(str, channels[:_SHOWN]))}"
        f"{', ...' if len(channels) > _SHOWN else ''}"
        for name, channels in bad[:_SHOWN]
    )
    raise ValueError(f"the norms of {shown} {what}.")
