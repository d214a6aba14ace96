"""Exact ranking over all ranks: where the total order is cut after k elements.

The order is (key of the score, position of the parameter in the caller's list,
row-major index in the whole parameter). Ranks exchange counts and histograms,
never scores; search.py has the search. Several segments (some parameters and a count: a layer, or
all of them) are cut side by side, with the same reads and the same all-reduces.

With floors and ceilings per parameter, the result is the cut of the total order at which
sum_i clamp(c_i, low_i, high_i) = k, where c_i is how many live elements of parameter i lie before
the cut, and low_i and high_i are how many this call has to, and may, prune of it. Each parameter
gives its lowest elements.

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

import numpy as np

from distprune.base.amount import CEILING, FLOOR, Bounds
from distprune.base.memory import Array
from distprune.ranking.passes import Common, Cuts, Passes
from distprune.ranking.search import Search, most_inside, sums_of

# Keys that segments side by side may collect, over all ranks.
_STORED = 1 << 24


class Ranking(Passes):
    """All live elements of some shards, in the order (key, position of the parameter, index)."""

    def cut(
        self,
        segments: Sequence[int] | Array,
        counts: Sequence[int] | Array,
        *,
        count_each: bool = False,
    ) -> Cuts:
        """Cut the order of each segment after exactly so many live elements. Collective.

        Args:
            segments: the number of the segment of each parameter; -1: it stays as it is.
            counts: per segment, elements before the cut, from 0 to its live elements.
            count_each: count ``Cuts.num_before``, and draft no masks: see passes.[Note: draft].

        Raises:
            ValueError: a live score is NaN, and NaN are refused; names its parameters. On every
                rank.
            RuntimeError: the scores changed between two scans.

        Cost: one scan of the scores (more when a bracket misses, or more keys lie in it than may be
        collected) and about ten all-reduces of up to 32 KiB for each segment; memory for the
        collected keys, about 0.5 % of them at 10**8 elements and less above.
        """
        owners, k = np.asarray(segments), np.asarray(counts)
        totals = sums_of(owners, self.num_live, len(k))
        stored = np.minimum(totals, most_inside(totals)).sum()
        if len(k) < 2 or stored <= _STORED:
            return Search(self, owners, k, totals).cut(count_each, bool(self.outs))
        half = len(k) // 2
        is_first = owners < half  # or in no segment
        first = self.cut(np.where(is_first, owners, -1), k[:half], count_each=count_each)
        last = self.cut(np.where(is_first, -1, owners - half), k[half:], count_each=count_each)
        return Cuts(
            np.where(is_first, first.threshold, last.threshold),
            np.where(is_first, first.index, last.index),
            np.concatenate([first.segments, last.segments]),
            np.where(is_first, first.num_before, last.num_before),
        )


def limits_for(
    k: int, bounds: Bounds, num_elements: Sequence[int], num_live: Sequence[int]
) -> Bounds:
    """What the bounds leave, given what is pruned already.

    Raises:
        ValueError: ``k`` elements do not suffice for the floors, or exceed the ceilings.
    """
    pruned = [n - live for n, live in zip(num_elements, num_live, strict=True)]
    limits = Bounds(
        tuple(max(0, low - p) for low, p in zip(bounds.lowest, pruned, strict=True)),
        tuple(max(0, high - p) for high, p in zip(bounds.highest, pruned, strict=True)),
    )
    after = f"{sum(pruned) + k:,} of {sum(num_elements):,} after this call"
    if sum(limits.lowest) > k:
        raise ValueError(
            f"min_sparsity needs {sum(limits.lowest):,} more pruned elements, and {k:,} are to be "
            f"pruned ({after}). Expected a budget that holds all floors: raise the amount to at "
            f"least {sum(limits.lowest):,} elements, or lower min_sparsity."
        )
    if sum(limits.highest) < k:
        raise ValueError(
            f"max_sparsity leaves {sum(limits.highest):,} elements that may be pruned, and {k:,} "
            f"are to be ({after}). Expected a budget within all ceilings: lower the amount to at "
            f"most {sum(limits.highest):,} elements, or raise max_sparsity."
        )
    return limits


def cut_within(
    ranking: Ranking, k: int, limits: Bounds
) -> tuple[Cuts, Common | None, list[str | None]]:
    """Choose exactly ``k`` elements in total order, each parameter within its limits. Collective.

    Args:
        ranking: what is ranked.
        k: elements before the cut, 0 <= k <= sum(ranking.num_live).
        limits: as :func:`limits_for` makes it.

    Returns:
        The cut of every parameter; that of the parameters that no bound decided: None if there are
        none, or if nothing is pruned of them; and the bound that decided how many elements of each
        parameter go, FLOOR or CEILING, or None.

    Raises:
        ValueError: a live score is NaN; names its parameters.

    Cost: a ranking of all parameters; one more of those that are left for each round of
    [Note: active set]; and one of each parameter that a bound decides, side by side.
    """
    lowest, highest = np.array(limits.lowest), np.array(limits.highest)
    is_free, left = np.ones(len(lowest), dtype=bool), k
    counts, bounds = np.zeros_like(lowest), np.full(len(lowest), None)
    common: Cuts | None = None
    while is_free.any():
        common = ranking.cut(np.where(is_free, 0, -1), [left], count_each=True)
        before = common.num_before
        clamped = before.clip(lowest, highest)
        total = int(clamped[is_free].sum())
        is_below = is_free & (before < lowest) & (total >= left)
        is_above = is_free & (before > highest) & (total <= left)
        is_decided = is_below | is_above
        if not is_decided.any():
            break
        bounds[is_below], bounds[is_above] = FLOOR, CEILING
        counts[is_decided] = clamped[is_decided]
        is_free &= ~is_decided
        left -= int(counts[is_decided].sum())
    numbers: list[str | None] = bounds.tolist()
    shared = common.common() if common is not None and is_free.any() and left else None
    if common is not None and is_free.all():
        return common, shared, numbers
    alone = ranking.cut(np.where(is_free, -1, (~is_free).cumsum() - 1), counts[~is_free])
    if common is not None:
        alone.threshold[is_free] = common.threshold[is_free]
        alone.index[is_free] = common.index[is_free]
    return alone, shared, numbers
