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
a smaller problem of the same kind with the same solution. All decisions are made on
sums that all ranks share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distprune._common.amount import CEILING, FLOOR, Bounds, violated_bound
from distprune.selection.bracket import COLLECT_ALL, sample_size
from distprune.selection.candidates import Candidates, Cut, PartCut, Ranked
from distprune.selection.search import Selection, search_lowest, search_together

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

    Cost: per round of [Note: active set] a selection among the free parameters; rounds are few in
    practice, and at most one more than parameters. Then one selection in each parameter that a
    bound decides, side by side, in batches that store at most some 16 million keys in all: about
    five all-reduces per batch, of up to 16 KiB per parameter; 70 KB per parameter in all. If the
    limits of all parameters are exact counts, there are no rounds.
    """
    parts, communicator = ranked.parts, ranked.communicator
    free = list(range(len(parts)))
    bound_of: dict[int, tuple[str, int]] = {}
    left, selection = k, None
    is_decided = limits.lowest == limits.highest  # by a budget: no cut is common
    if is_decided:
        bound_of = {i: (FLOOR, count) for i, count in enumerate(limits.lowest)}
        free = []
    while free:
        search = search_lowest(
            # The first round reads everything.
            ranked.only(free, refuse_nan=ranked.refuse_nan and not bound_of),
            left,
            count_each=True,
            is_wanted=lambda counts: not _beyond_limits(free, counts, limits),  # noqa: B023
        )
        (selection,) = search_together([search], communicator)
        fixed = _beyond_limits(free, selection.num_before, limits)
        if not fixed:
            break
        bound_of |= fixed
        free = [i for i in free if i not in bound_of]
        left = k - sum(count for _, count in bound_of.values())
    refuse_nan = ranked.refuse_nan and is_decided
    searches = {
        i: search_lowest(ranked.only([i], refuse_nan=refuse_nan), count)
        for i, (_, count) in bound_of.items()
    }
    cuts: dict[int, Cut] = {}
    for batch in _batches(parts, list(bound_of)):
        selections = search_together([searches[i] for i in batch], communicator)
        cuts |= {i: selection.cut for i, selection in zip(batch, selections, strict=True)}
    part_cuts = {i: PartCut(0, cut, bound_of[i][0]) for i, cut in cuts.items()}
    for position, i in enumerate(free):
        assert selection is not None
        part_cuts[i] = PartCut(position, selection.cut)
    return [part_cuts[i] for i in range(len(parts))], selection if free and left else None


def _beyond_limits(
    free: Sequence[int], counts: Sequence[int], limits: Limits
) -> dict[int, tuple[str, int]]:
    """The free parameters whose bound and count are certain; see [Note: active set]."""
    floors, ceilings, missing, excess = {}, {}, 0, 0
    for i, count in zip(free, counts, strict=True):
        if count < limits.lowest[i]:
            floors[i] = (FLOOR, limits.lowest[i])
            missing += limits.lowest[i] - count
        elif count > limits.highest[i]:
            ceilings[i] = (CEILING, limits.highest[i])
            excess += count - limits.highest[i]
    if missing == excess:
        return floors | ceilings
    return floors if missing > excess else ceilings


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
