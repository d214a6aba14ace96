"""The order of channels over all groups, and where it is cut: plain arithmetic, no communication.

All ranks work on the same numbers, and come to the same cut. Channels are numbered group by group,
so that the order (score, group, index) is that of (score, number).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from distprune._common.amount import Amount, Bounds, checked_count
from distprune._common.exact_sums import Normalization, power_of

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
        scores: of all groups, finite where they are live.
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
