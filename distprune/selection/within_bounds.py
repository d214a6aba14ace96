"""Exact selection with floors and ceilings per parameter, over all ranks.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from distprune.base.amount import CEILING, FLOOR, Bounds, violated_bound
from distprune.selection.bracket import COLLECT_ALL, sample_size
from distprune.selection.candidates import Candidates, PartCut, Ranked
from distprune.selection.search import Selection, search_lowest, search_together, select_lowest

# Keys that searches side by side may store, over all ranks.
_STORED = 1 << 24


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


def select_within(ranked: Ranked, k: int, limits: Limits) -> tuple[list[PartCut], Selection | None]:
    """Choose exactly ``k`` elements in total order, each parameter within its limits. Collective.

    Args:
        ranked, k: as for ``select_lowest``.
        limits: as :func:`limits_for` makes it.

    Returns:
        The cut of every parameter; and the selection among the parameters that no bound decided:
        None if there are none, or if nothing is pruned of them.

    Raises:
        ValueError: a live score is NaN; names its parameters.

    Cost: a selection among all parameters; one more among those that are left for each round of
    [Note: active set]; and one in each parameter that a bound decides, side by side, in batches
    that store at most some 16 million keys in all. If the limits of all parameters are exact
    counts, there are no rounds.
    """
    free, left = list(range(len(ranked.parts))), k
    bound_of: dict[int, tuple[str, int]] = {}
    selection: Selection | None = None
    is_decided = limits.lowest == limits.highest  # by a budget: no cut is common
    if is_decided:
        free, left = [], 0
        bound_of = {i: (FLOOR, count) for i, count in enumerate(limits.lowest)}
    while free and selection is None:
        # The first round reads everything.
        some = ranked.only(free, refuse_nan=ranked.refuse_nan and not bound_of)
        found = select_lowest(some, left, count_each=True)
        decided = _beyond_limits(free, found.num_before, limits, left)
        if not decided:
            selection = found
        bound_of |= decided
        free = [i for i in free if i not in decided]
        left -= sum(count for _, count in decided.values())
    counts = {i: count for i, (_, count) in bound_of.items()}
    alone = _search_each(ranked, counts, refuse_nan=ranked.refuse_nan and is_decided)
    cuts = {i: PartCut(0, own.cut, bound_of[i][0]) for i, own in alone.items()}
    if selection is not None:
        cuts |= {i: PartCut(position, selection.cut) for position, i in enumerate(free)}
    return [cuts[i] for i in range(len(ranked.parts))], selection if left else None


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


def _search_each(
    ranked: Ranked, counts: Mapping[int, int], *, refuse_nan: bool
) -> dict[int, Selection]:
    """The cuts of parameters that are ranked by themselves, after so many elements. Collective."""
    found: dict[int, Selection] = {}
    for batch in _batches(ranked.parts, list(counts)):
        searches = [
            search_lowest(ranked.only([i], refuse_nan=refuse_nan), counts[i]) for i in batch
        ]
        found |= zip(batch, search_together(searches, ranked.communicator), strict=True)
    return found


def _batches(parts: Sequence[Candidates], positions: Sequence[int]) -> Iterator[list[int]]:
    """Cut a list of parameters into those whose searches run side by side; one at least."""
    batch: list[int] = []
    size = 0.0
    for i in positions:
        stored = min(parts[i].numel, max(COLLECT_ALL, 2 * sample_size(parts[i].numel)))
        if batch and size + stored > _STORED:
            yield batch
            batch, size = [], 0.0
        batch.append(i)
        size += stored
    if batch:
        yield batch
