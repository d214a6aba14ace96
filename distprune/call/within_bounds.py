"""Exact selection with floors and ceilings per parameter, over all ranks.

Wanted is a cut of the total order such that sum_i clamp(c_i, low_i, high_i) = k, where
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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from distprune._common.bounds import Bounds
from distprune._common.collectives import Communicator
from distprune.call.context import PruningCall
from distprune.selection.candidates import Candidates, Cut
from distprune.selection.cut import Selection, search_lowest, search_together, select_lowest
from distprune.selection.keys import KeyRange

FLOOR, CEILING = "min_sparsity", "max_sparsity"


@dataclass(frozen=True)
class Share:
    """What one parameter has to give: all its live elements before a cut.

    Attributes:
        position: of the parameter in the list that was cut.
        cut: where.
        held_at: the bound that decided how many; None if the common cut did.
    """

    position: int
    cut: Cut
    held_at: str | None = None


@dataclass(frozen=True)
class Room:
    """How many more elements of every whole parameter a call has to, and may, prune."""

    lowest: tuple[int, ...]
    highest: tuple[int, ...]


def choose(
    call: PruningCall,
    parts: Sequence[Candidates],
    k: int,
    keys: KeyRange,
    drafts: Sequence[Tensor],
) -> tuple[list[Share], Selection | None]:
    """Choose exactly ``k`` elements of a call in total order, within its bounds if it has any.

    Args:
        drafts: flat masks, uninitialised, that the selection may draft; not where there are bounds.

    Returns:
        What every parameter gives; and the selection that decided where no bound did, if any.

    Raises:
        ValueError: a live score is NaN, or the bounds do not allow for ``k``; on every rank.
    """
    names = [shard.name for shard in call.shards]
    if call.bounds is not None:
        room = room_for(k, call.bounds, [shard.numel for shard in call.shards], call.num_live)
        return select_within(parts, names, call.num_live, k, keys, call.communicator, room)
    selection = select_lowest(
        parts, names, call.num_live, k, keys, call.communicator, refuse_nan=True, drafts=drafts
    )
    shares = [Share(position, selection.cut) for position in range(len(parts))]
    return shares, selection if k else None


def room_for(k: int, bounds: Bounds, num_elements: Sequence[int], num_live: Sequence[int]) -> Room:
    """What is left between the bounds and what is pruned already.

    Raises:
        ValueError: ``k`` elements do not suffice for the floors, or exceed the ceilings.
    """
    pruned = [n - live for n, live in zip(num_elements, num_live, strict=True)]
    room = Room(
        tuple(max(0, low - p) for low, p in zip(bounds.lowest, pruned, strict=True)),
        tuple(max(0, high - p) for high, p in zip(bounds.highest, pruned, strict=True)),
    )
    after = f"{sum(pruned) + k:,} of {sum(num_elements):,} after this call"
    if sum(room.lowest) > k:
        raise ValueError(
            f"min_sparsity needs {sum(room.lowest):,} more pruned elements, and {k:,} are to be "
            f"pruned ({after}). Expected a budget that holds all floors: raise the amount to at "
            f"least {sum(room.lowest):,} elements, or lower min_sparsity."
        )
    if sum(room.highest) < k:
        raise ValueError(
            f"max_sparsity leaves {sum(room.highest):,} elements that may be pruned, and {k:,} are "
            f"to be ({after}). Expected a budget within all ceilings: lower the amount to at most "
            f"{sum(room.highest):,} elements, or raise max_sparsity."
        )
    return room


def select_within(
    parts: Sequence[Candidates],
    names: Sequence[str],
    num_live: Sequence[int],
    k: int,
    keys: KeyRange,
    communicator: Communicator,
    room: Room,
) -> tuple[list[Share], Selection | None]:
    """Choose exactly ``k`` elements in total order, each parameter within its room.

    Args:
        parts, names, num_live, k, keys, communicator: as for ``select_lowest``.
        room: as :func:`room_for` makes it.

    Returns:
        What every parameter gives; and the selection among the parameters that no bound
        held, None if all were held, or those that were not give nothing.

    Raises:
        ValueError: a live score is NaN; names its parameters.

    Cost: per round of [Note: active set] a selection among the free parameters; rounds are few in
    practice, and at most one more than parameters. Then
    one selection in each parameter that is held, all of them side by side: about ten
    all-reduces, of up to 16 KiB per parameter.
    """
    free = list(range(len(parts)))
    held: dict[int, tuple[str, int]] = {}
    left, selection = k, None
    while free:
        among = [parts[i] for i in free]
        selection = select_lowest(
            among,
            [names[i] for i in free],
            [num_live[i] for i in free],
            left,
            keys,
            communicator,
            refuse_nan=not held,  # the first round reads everything
            count_each=True,
        )
        fixed = _out_of_room(free, selection.num_before, room)
        if not fixed:
            break
        held |= fixed
        free = [i for i in free if i not in held]
        left = k - sum(count for _, count in held.values())
    cuts = _cuts_of_held(parts, names, num_live, keys, communicator, held)
    shares = {i: Share(0, cut, held[i][0]) for i, cut in cuts.items()}
    for position, i in enumerate(free):
        assert selection is not None
        shares[i] = Share(position, selection.cut)
    return [shares[i] for i in range(len(parts))], selection if free and left else None


def _out_of_room(
    free: Sequence[int], counts: Sequence[int], room: Room
) -> dict[int, tuple[str, int]]:
    """The free parameters whose bound and count are certain; see [Note: active set]."""
    floors, ceilings, missing, excess = {}, {}, 0, 0
    for i, count in zip(free, counts, strict=True):
        if count < room.lowest[i]:
            floors[i] = (FLOOR, room.lowest[i])
            missing += room.lowest[i] - count
        elif count > room.highest[i]:
            ceilings[i] = (CEILING, room.highest[i])
            excess += count - room.highest[i]
    if missing == excess:
        return floors | ceilings
    return floors if missing > excess else ceilings


def _cuts_of_held(
    parts: Sequence[Candidates],
    names: Sequence[str],
    num_live: Sequence[int],
    keys: KeyRange,
    communicator: Communicator,
    held: Mapping[int, tuple[str, int]],
) -> dict[int, Cut]:
    """A cut of its own for every parameter that is held at a bound."""
    searches = [
        search_lowest([parts[i]], [names[i]], [num_live[i]], count, keys, refuse_nan=False)
        for i, (_, count) in held.items()
    ]
    found = search_together(searches, communicator)
    return {i: selection.cut for i, selection in zip(held, found, strict=True)}
