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
a smaller problem of the same kind with the same solution. The same holds of any other
cut: what it shows is certain, if g is compared with k. All decisions are made on sums that
all ranks share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from distprune._common.amount import CEILING, FLOOR, Bounds, violated_bound
from distprune._common.memory import Array
from distprune._common.naming import subject_of
from distprune.selection.bracket import COLLECT_ALL, margin_of, sample, sample_size
from distprune.selection.candidates import Candidates, Cut, PartCut, Ranked
from distprune.selection.search import Selection, search_lowest, search_together
from distprune.selection.tallies import are_tallied

# Keys that searches side by side may store, over all ranks.
_STORED = 1 << 24
# Of a guess: keys that a step counts up to, and the most that it samples.
_NUM_PIVOTS, _MOST_SAMPLED = 15, 1 << 22


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

    Cost: about one read of the scores, of which a sample says which parameters a bound decides: a
    selection among the free ones, and then one in each other, side by side, in batches that store
    at most some 16 million keys in all. One more read of the free ones for each round of [Note:
    active set] if the sample was wrong, which it seldom is for long; nothing is read of tallies.
    About twenty all-reduces, and five per batch; 80 KB per parameter in all. If the limits of all
    parameters are exact counts, there are no rounds.
    """
    everything = list(range(len(ranked.parts)))
    is_decided = limits.lowest == limits.highest  # by a budget: no cut is common
    state = _State(everything, k)
    if is_decided:
        state.fix({i: (FLOOR, count) for i, count in enumerate(limits.lowest)})
    elif sum(ranked.num_live) > COLLECT_ALL and not are_tallied(ranked.parts):
        _begin_by_sample(ranked, limits, state)
    while state.free and state.selection is None:
        free, left = state.free, state.left
        search = search_lowest(
            # The first round reads everything.
            ranked.only(free, refuse_nan=ranked.refuse_nan and not state.bound_of),
            left,
            count_each=True,
            is_wanted=lambda counts: not _beyond_limits(free, counts, limits, left)[0],  # noqa: B023
        )
        (selection,) = search_together([search], ranked.communicator)
        fixed, _ = _beyond_limits(free, selection.num_before, limits, left)
        if not fixed:
            state.selection = selection
        state.fix(fixed)
    missing = {i: n for i, (_, n) in state.bound_of.items() if i not in state.cuts}
    found = _search_each(ranked, missing, refuse_nan=ranked.refuse_nan and is_decided)
    state.cuts |= {i: own.cut for i, own in found.items()}
    part_cuts = {i: PartCut(0, cut, state.bound_of[i][0]) for i, cut in state.cuts.items()}
    for position, i in enumerate(state.free):
        assert state.selection is not None
        part_cuts[i] = PartCut(position, state.selection.cut)
    return [part_cuts[i] for i in everything], state.selection if state.left else None


@dataclass
class _State:
    """What is known of a call.

    Attributes:
        free: the parameters that no bound is known to decide.
        left: elements to prune of these.
        bound_of: of the others, the bound, and how many elements go.
        cuts: of some of them, where they are cut.
        selection: among the free ones, if that is all there is.
    """

    free: list[int]
    left: int
    bound_of: dict[int, tuple[str, int]] = field(default_factory=dict)
    cuts: dict[int, Cut] = field(default_factory=dict)
    selection: Selection | None = None

    def fix(self, decided: Mapping[int, tuple[str, int]]) -> None:
        """Note which bounds decide."""
        self.bound_of |= decided
        self.free = [i for i in self.free if i not in decided]
        self.left -= sum(count for _, count in decided.values())


def _beyond_limits(
    positions: Sequence[int], counts: Sequence[int], limits: Limits, k: int
) -> tuple[dict[int, tuple[str, int]], bool]:
    """The parameters whose bound and count are certain: see [Note: active set].

    Args:
        positions: of the parameters.
        counts: their elements before any cut.
        k: how many elements they are to lose.

    Returns:
        The bounds; and whether they lose so many at this cut, within their limits.
    """
    floors, ceilings, total = {}, {}, 0
    for i, count in zip(positions, counts, strict=True):
        if count < limits.lowest[i]:
            floors[i] = (FLOOR, limits.lowest[i])
        elif count > limits.highest[i]:
            ceilings[i] = (CEILING, limits.highest[i])
        total += min(max(count, limits.lowest[i]), limits.highest[i])
    if total == k:
        return floors | ceilings, True
    return floors if total > k else ceilings, False


def _begin_by_sample(ranked: Ranked, limits: Limits, state: _State) -> None:
    """A first round whose cut is close to the right one. Collective.

    It cuts the parameters that no bound decides by a sample, and counts the others there while
    their own cuts are searched. What it notes is certain, whatever the sample said.
    """
    guess = _guess(ranked, state.left, limits)
    free = [i for i in state.free if i not in guess]
    left = state.left - sum(count for _, count in guess.values())
    if not guess or not 0 < left <= sum(ranked.num_live[i] for i in free):
        return
    refuse_nan = ranked.refuse_nan
    try:
        search = search_lowest(ranked.only(free, refuse_nan=refuse_nan), left, count_each=True)
        (selection,) = search_together([search], ranked.communicator)
        threshold = selection.cut.threshold
        own = {i: count for i, (_, count) in guess.items()}
        found = _search_each(ranked, own, refuse_nan=refuse_nan, pivots=(threshold - 1, threshold))
    except ValueError as error:
        if subject_of(error)[0] != "nan":
            raise
        return  # a round over all parameters names each that has NaN
    cut = selection.cut
    last = free[cut.parameter] if cut.parameter < len(free) else len(ranked.parts)
    counts = dict(zip(free, selection.num_before, strict=True))
    for i, of_one in found.items():
        counts[i] = of_one.num_upto[threshold if i < last else threshold - 1]
    everything = sorted(counts)
    fixed, is_right = _beyond_limits(
        everything, [counts[i] for i in everything], limits, state.left
    )
    if is_right:  # limits that meet, as where all parameters are at one, decide
        for i in free:
            if counts[i] == limits.lowest[i] > 0:
                fixed[i] = (FLOOR, counts[i])
            elif counts[i] == limits.highest[i] < ranked.num_live[i]:
                fixed[i] = (CEILING, counts[i])
    state.cuts = {i: found[i].cut for i in fixed if guess.get(i) == fixed[i]}
    if len(free) == 1 and free[0] in fixed:
        state.cuts[free[0]] = cut
    state.fix(fixed)
    if is_right and fixed.keys() == guess.keys():
        state.selection = selection


def _guess(ranked: Ranked, k: int, limits: Limits) -> dict[int, tuple[str, int]]:
    """The parameters that a bound decides, by a sample that leaves no doubt. Collective.

    Cost: a sample of the scores; some ten all-reduces of 120 bytes per parameter.
    """
    parts, keys, num_live = ranked.parts, ranked.keys, np.array(ranked.num_live)
    total, generator = sum(part.numel for part in parts), np.random.default_rng(0)
    rate = min(1.0, min(sample_size(total), _MOST_SAMPLED) / total)
    drawn: list[Array] = []

    def draw() -> Tensor:
        for part in parts:
            own = np.sort(sample([part], rate, keys.high + 1, generator).cpu().numpy())
            drawn.append(own[: np.searchsorted(own, keys.largest_number, "right")])
        return torch.tensor([len(own) for own in drawn])

    def count() -> Tensor:
        counts = [np.searchsorted(own, pivots, "right") for own in drawn]
        return torch.from_numpy(np.concatenate(counts).astype(np.int64))

    num_drawn = ranked.communicator.reduce(len(parts), draw).numpy()
    # Elements that one of the sample stands for.
    scale = num_live / np.maximum(num_drawn, 1)
    lowest, highest = np.array(limits.lowest), np.array(limits.highest)
    low, high = keys.low, keys.largest_number
    while low < high:
        step = max(1, (high - low + 1) // (_NUM_PIVOTS + 1))
        pivots = [low + step * number - 1 for number in range(1, _NUM_PIVOTS + 1)]
        shared = ranked.communicator.reduce(len(parts) * _NUM_PIVOTS, count).numpy()
        estimates = shared.reshape(len(parts), _NUM_PIVOTS) * scale[:, None]
        held = np.clip(estimates, lowest[:, None], highest[:, None]).sum(axis=0)
        number = int((held < k).sum())
        low = pivots[number - 1] + 1 if number else low
        high = min(high, pivots[number]) if number < _NUM_PIVOTS else high
    pivots = [low]
    counts = ranked.communicator.reduce(len(parts), count).tolist()
    guess = {}
    for i, (number, size) in enumerate(zip(counts, num_drawn.tolist(), strict=True)):
        if not size:
            continue
        margin = margin_of(number, size)
        if (number + margin) * scale[i] < lowest[i]:
            guess[i] = (FLOOR, limits.lowest[i])
        elif (number - margin) * scale[i] > highest[i]:
            guess[i] = (CEILING, limits.highest[i])
    return guess


def _search_each(
    ranked: Ranked, counts: Mapping[int, int], *, refuse_nan: bool, pivots: Sequence[int] = ()
) -> dict[int, Selection]:
    """The cuts of parameters that are ranked by themselves, after so many elements. Collective."""
    found: dict[int, Selection] = {}
    for batch in _batches(ranked.parts, list(counts)):
        searches = [
            search_lowest(ranked.only([i], refuse_nan=refuse_nan), counts[i], pivots=pivots)
            for i in batch
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
