"""Exact ranking with floors and ceilings per parameter, over all ranks.

The result is the cut of the total order at which sum_i clamp(c_i, low_i, high_i) = k, where
c_i is how many live elements of parameter i lie before the cut, and low_i and high_i are how
many this call has to, and may, prune of it. Each parameter gives its lowest elements.

[Note: active set] Cut the order of the free parameters after k elements, without
regard to bounds. Let D = sum_i max(0, low_i - c_i) be what is missing at floors, and E
= sum_i max(0, c_i - high_i) what is too much at ceilings; clamping gives g = k + D - E
elements. No c_i decreases as the cut rises, and so neither does g. If D > E, then g > k, and
every cut that is right lies lower: a parameter that is below its floor here is below
it there too, and has low_i elements whatever the cut. So it is fixed, and k shrinks by
low_i. If E > D, the same holds of those above their ceiling. If D = E, then g = k: this
cut is right, and both are fixed. Each round but the last fixes a parameter, and what is left is
a smaller problem of the same kind with the same solution. All decisions are made on sums that
all ranks share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from distprune.base.amount import CEILING, FLOOR, Bounds, violated_bound
from distprune.ranking.ranking import Cut, Ranking, ShardCut


@dataclass(frozen=True)
class Limits:
    """How many more elements of every whole parameter a call must, and may, prune."""

    lowest: tuple[int, ...]
    highest: tuple[int, ...]


def limits_for(
    k: int, bounds: Bounds, num_elements: Sequence[int], num_live: Sequence[int]
) -> Limits:
    """What the bounds leave, given what is pruned already.

    Raises:
        ValueError: ``k`` elements do not suffice for the floors, or exceed the ceilings.
    """
    pruned = [n - live for n, live in zip(num_elements, num_live, strict=True)]
    limits = Limits(
        tuple(max(0, low - p) for low, p in zip(bounds.lowest, pruned, strict=True)),
        tuple(max(0, high - p) for high, p in zip(bounds.highest, pruned, strict=True)),
    )
    after = f"{sum(pruned) + k:,} of {sum(num_elements):,} after this call"
    violated = violated_bound(k, sum(limits.lowest), sum(limits.highest))
    if violated == FLOOR:
        raise ValueError(
            f"min_sparsity needs {sum(limits.lowest):,} more pruned elements, and {k:,} are to be "
            f"pruned ({after}). Expected a budget that holds all floors: raise the amount to at "
            f"least {sum(limits.lowest):,} elements, or lower min_sparsity."
        )
    if violated == CEILING:
        raise ValueError(
            f"max_sparsity leaves {sum(limits.highest):,} elements that may be pruned, and {k:,} "
            f"are to be ({after}). Expected a budget within all ceilings: lower the amount to at "
            f"most {sum(limits.highest):,} elements, or raise max_sparsity."
        )
    return limits


def cut_within(
    ranking: Ranking, k: int, limits: Limits, drafts: Sequence[Tensor] | None = None
) -> tuple[list[ShardCut], Cut | None]:
    """Choose exactly ``k`` elements in total order, each parameter within its limits. Collective.

    Args:
        ranking: what is ranked.
        k: elements before the cut, 0 <= k <= sum(ranking.num_live).
        limits: as :func:`limits_for` makes it.
        drafts: as for ``Ranking.cut``.

    Returns:
        The cut of every parameter; and the cut of the parameters that no bound decided: None if
        there are none, or if nothing is pruned of them.

    Raises:
        ValueError: a live score is NaN; names its parameters.

    Cost: a ranking of all parameters; one more of those that are left for each round of
    [Note: active set]; and one of each parameter that a bound decides, side by side. If the limits
    of all parameters are exact counts, there are no rounds.
    """
    free, left = list(range(len(ranking.shards))), k
    bound_of: dict[int, tuple[str, int]] = {}
    common: Cut | None = None
    if limits.lowest == limits.highest:  # by a budget: no cut is common
        free, left = [], 0
        bound_of = {i: (FLOOR, count) for i, count in enumerate(limits.lowest)}
    while free and common is None:
        (cut,) = ranking.cut([free], [left], count_each=True)
        decided = _beyond_limits(free, cut.num_before, limits, left)
        if not decided:
            common = cut
        bound_of |= decided
        free = [i for i in free if i not in decided]
        left -= sum(count for _, count in decided.values())
    counts = [count for _, count in bound_of.values()]
    alone = ranking.cut([[i] for i in bound_of], counts, drafts=drafts)
    cuts = {
        i: cut.at(i, bound) for (i, (bound, _)), cut in zip(bound_of.items(), alone, strict=True)
    }
    if common is not None:
        cuts |= {i: common.at(i) for i in free}
    return [cuts[i] for i in range(len(ranking.shards))], common if left else None


def _beyond_limits(
    positions: Sequence[int], counts: Sequence[int], limits: Limits, k: int
) -> dict[int, tuple[str, int]]:
    """The parameters whose bound and count are certain: see [Note: active set].

    Args:
        positions: of the parameters.
        counts: their elements before a cut of ``k`` elements.
    """
    floors, ceilings, total = {}, {}, 0
    for i, count in zip(positions, counts, strict=True):
        if count < limits.lowest[i]:
            floors[i] = (FLOOR, limits.lowest[i])
        elif count > limits.highest[i]:
            ceilings[i] = (CEILING, limits.highest[i])
        total += min(max(count, limits.lowest[i]), limits.highest[i])
    if total == k:
        return floors | ceilings
    return floors if total > k else ceilings
