"""From the budget of a call to the exact number of pruned elements of each parameter."""

from __future__ import annotations

from collections.abc import Sequence

from distprune._common.amount import Amount, Bounds, bound_met, checked_count
from distprune.budgets.base import Counts, Ranked
from distprune.call.context import Divided, PruningCall, Together
from distprune.selection.candidates import Candidates
from distprune.selection.keys import KeyRange
from distprune.selection.within_bounds import limits_for


def divide(
    call: PruningCall, share: Together, amount: Amount, parts: Sequence[Candidates], keys: KeyRange
) -> tuple[int, Bounds | None, Counts | None]:
    """How many elements to prune, and the bounds of each parameter. Collective.

    Args:
        call: the parameters.
        share: their bounds and budget.
        amount: how many elements, as a fraction of what is unpruned or a count; not used if the
            budget gives the total.
        parts: this rank's part of every parameter.
        keys: the range of all keys.

    Returns:
        Elements to prune now; the bounds, or those of the budget, where lowest and highest are
        equal; and the counts of the budget, if there is one.

    Raises:
        ValueError: the bounds or the budget do not allow for the amount; on every rank.

    Cost: that of the budget.
    """
    if not isinstance(share, Divided):
        return checked_count(amount, sum(call.num_live)), share.bounds, None
    sizes = [shard.numel for shard in call.shards]
    pruned = [size - live for size, live in zip(sizes, call.num_live, strict=True)]
    bounds = share.bounds or Bounds((0,) * len(sizes), tuple(sizes))
    within = Bounds(tuple(map(max, pruned, bounds.lowest)), tuple(map(max, pruned, bounds.highest)))
    if share.has_amount:
        k = checked_count(amount, sum(call.num_live))
    else:
        total = share.division.own_total(within)
        assert total is not None
        k = total - sum(pruned)
    limits_for(k, bounds, sizes, call.num_live)
    ranked = Ranked(parts, call.num_live, keys, call.communicator)
    counts = share.division.counts(sum(pruned) + k, within, ranked)
    return k, Bounds(counts.counts, counts.counts), counts


def bounds_met(call: PruningCall, bounds: Bounds | None, counts: Counts) -> list[str | None]:
    """Per parameter, the floor or the ceiling that the count of a budget meets, if any."""
    if bounds is None:
        return [None] * len(call.shards)
    return [
        bound_met(count, low, high, shard.numel, shard.numel - live)
        for shard, live, count, low, high in zip(
            call.shards, call.num_live, counts.counts, bounds.lowest, bounds.highest, strict=True
        )
    ]
