"""Whether masks are those of one ranking, within limits: judged by the weights and the masks alone.

[Note: one ranking] Each tensor has to lose its own lowest elements: the last pruned one comes
before the first kept one. Between tensors, let A be one that lost more than its floor, and B one
that lost less than its ceiling. If the last pruned element of A came after the first kept one of B,
the two could be exchanged for a lower sum of ranks. So masks with the right counts are those of
the ranking if and only if the last pruned element of all such A comes before the first kept one
of all such B. Elements are compared by (key, place in the ranking), so ties count.

The ends of all tensors, which are found in one read, also tell where the ranking was cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from distprune.files.checks.contents import shown
from distprune.files.checks.ordering import Ranking
from distprune.files.planning import Plan, PlannedTensor
from distprune.files.ranking.scores import Array
from distprune.files.ranking.searching import Cut, TensorCut


class GroupOrder:
    """Checks a group of tensors that are ranked together.

    Args:
        plan: what the masks are to be.
        number: of the group.
        rankings: by position of a tensor, what others have found; more can be added.

    Memory: a few numbers for each tensor. No threshold is needed, and none is trusted.
    """

    def __init__(
        self, plan: Plan, number: int, rankings: Mapping[int, Ranking] | None = None
    ) -> None:
        self._plan = plan
        self._number = number
        self._rankings = dict(rankings or {})

    def add(self, position: int, first: int, keys: Array, keep: Array) -> None:
        """Take in a piece of a tensor, in any order of pieces.

        Args:
            position: of the tensor.
            first: index of the first element.
            keys: 1-d, in the format of the group.
            keep: bool, like keys.
        """
        ranking = self._rankings.setdefault(position, Ranking())
        ranking.add(keys, keep, self._plan.tensors[position].offset + first)

    def problems(self) -> list[str]:
        """All that is wrong; to be asked once all tensors have been taken in."""
        return [*self._count_problems(), *self._order_problems()]

    def cuts(self) -> tuple[Cut | None, list[TensorCut]]:
        """Where the ranking and each tensor of a group with limits were cut.

        They are those that ``decide`` finds, if there are no problems; of a tensor that a limit
        held, ``num_ties`` and ``num_most`` are all that went with its threshold.
        """
        pairs = [(self._plan.tensors[p], ends) for p, ends in sorted(self._rankings.items())]
        freely = [e.top for t, e in pairs if e.num_pruned > t.lowest and e.top is not None]
        threshold = max(freely, default=None)
        cut = None
        if threshold is not None:
            going = [
                min(e.num_top, e.num_pruned - t.lowest) for t, e in pairs if e.top == threshold
            ]
            num_ties = sum(_num_free(t, e, threshold) for t, e in pairs)
            cut = Cut(threshold, num_ties, sum(going))
        if not self._plan.groups[self._number].has_limits:
            return cut, []
        tensors = []
        for position, ends in sorted(self._rankings.items()):
            held_at = _held_at(self._plan.tensors[position], ends, threshold)
            key = threshold if held_at is None else ends.top
            tensors.append(TensorCut(position, key or 0, held_at, ends.num_top, ends.num_top))
        return cut, tensors

    def _count_problems(self) -> list[str]:
        group = self._plan.groups[self._number]
        problems = []
        for position, ends in self._rankings.items():
            tensor = self._plan.tensors[position]
            if not tensor.lowest <= ends.num_pruned <= tensor.highest:
                problems.append(
                    f"{tensor.entry.name}: {ends.num_pruned} elements are pruned; the limits of "
                    f"the recipe allow for {tensor.lowest} to {tensor.highest}."
                )
        total = sum(ends.num_pruned for ends in self._rankings.values())
        if len(self._plan.groups) > 1 and total != group.num_to_prune:
            problems.append(
                f"{total} elements are pruned in group {self._number}; the recipe asks for "
                f"{group.num_to_prune}."
            )
        return problems

    def _order_problems(self) -> list[str]:
        wrong = [(p, p) for p, ends in self._rankings.items() if _is_wrong(ends, ends)]
        problems = []
        for last, first in wrong or self._wrong_between():
            pruned, kept = self._plan.tensors[last], self._plan.tensors[first]
            problems.append(
                f"{shown(pruned.entry.name)}: element "
                f"{self._rankings[last].last_top - pruned.offset} is pruned, but comes after a "
                "kept one in the order of scores, which is element "
                f"{self._rankings[first].first_bottom - kept.offset} of {shown(kept.entry.name)}."
            )
        return problems

    @property
    def is_ordered(self) -> bool:
        """Whether no pruned element comes after a kept one that could take its place."""
        return not self._order_problems()

    def _wrong_between(self) -> list[tuple[int, int]]:
        tensors, ends = self._plan.tensors, self._rankings
        could_keep = [p for p in ends if ends[p].num_pruned > tensors[p].lowest]
        could_lose = [p for p in ends if ends[p].num_pruned < tensors[p].highest]
        if not could_keep or not could_lose:
            return []
        last = max(could_keep, key=lambda p: (ends[p].top, ends[p].last_top))
        first = min(could_lose, key=lambda p: (ends[p].bottom, ends[p].first_bottom))
        return [(last, first)] if _is_wrong(ends[last], ends[first]) else []


def _is_wrong(pruned: Ranking, kept: Ranking) -> bool:
    """Whether the last pruned element of one comes after the first kept one of another."""
    if pruned.top is None or kept.bottom is None:
        return False
    return (pruned.top, pruned.last_top) > (kept.bottom, kept.first_bottom)


def _num_free(tensor: PlannedTensor, ends: Ranking, threshold: int) -> int:
    """How many elements with the threshold no limit decides on."""
    if ends.top is not None and ends.top > threshold:  # a floor holds the tensor
        return 0
    num_pruned = ends.num_top if ends.top == threshold else 0
    num_kept = ends.num_bottom if ends.bottom == threshold else 0
    below = ends.num_pruned - num_pruned

    def within(count: int) -> int:
        return min(max(count, tensor.lowest), tensor.highest)

    return within(ends.num_pruned + num_kept) - within(below)


def _held_at(tensor: PlannedTensor, ends: Ranking, threshold: int | None) -> str | None:
    """The limit that decided how much a tensor lost, as ``TensorCut`` has it."""
    if threshold is None:
        return "min_sparsity"
    top = -1 if ends.top is None else ends.top
    if ends.num_pruned == tensor.lowest and top > threshold:
        return "min_sparsity"
    if ends.num_pruned == tensor.highest and top < threshold:
        return "max_sparsity"
    return None
