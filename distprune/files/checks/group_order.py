"""Whether masks are those of one ranking, within limits: judged by the weights and the masks alone.

[Note: one ranking] Each tensor has to lose its own lowest elements: the last pruned one comes
before the first kept one. Between tensors, let A be one that lost more than its floor, and B one
that lost less than its ceiling. If the last pruned element of A came after the first kept one of B,
the two could be exchanged for a lower sum of ranks. So masks with the right counts are those of
the ranking if and only if the last pruned element of all such A comes before the first kept one
of all such B. Elements are compared by (key, place in the ranking), so ties count.

The boundaries of all tensors, which are found in one read, also tell where the ranking was cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from distprune._common.bounds import CEILING, FLOOR
from distprune.files.checks.boundary import Boundary, Edge
from distprune.files.planning import Plan, PlannedTensor
from distprune.files.ranking.keys import Array
from distprune.files.ranking.searching import Cut, TensorCut
from distprune.files.text import printable

# A tensor and one of its elements.
_Element = tuple[PlannedTensor, Edge]


class GroupOrder:
    """Checks a group of tensors that are ranked together.

    Args:
        plan: what the masks should be.
        number: of the group.
        boundaries: by position of a tensor, what has been found so far; more can be added.

    Memory: a few numbers for each tensor. No threshold is needed, and none is trusted.
    """

    def __init__(
        self, plan: Plan, number: int, boundaries: Mapping[int, Boundary] | None = None
    ) -> None:
        self._plan = plan
        self._number = number
        self._boundaries = dict(boundaries or {})

    def add(self, position: int, first: int, keys: Array, keep: Array) -> None:
        """Add a piece of a tensor, in any order of pieces.

        Args:
            position: of the tensor.
            first: index of the first element, or of the first tile.
            keys: 1-d, in the format of the group.
            keep: bool, like keys.
        """
        boundary = self._boundaries.setdefault(position, Boundary())
        boundary.add(keys, keep, self._plan.tensors[position].offset + first)

    def problems(self) -> list[str]:
        """All that is wrong; call this when all tensors have been added."""
        return [*self._count_problems(), *self._order_problems()]

    @property
    def is_ordered(self) -> bool:
        """Whether no pruned element comes after a kept one that could take its place."""
        return not self._disordered()

    def cuts(self) -> tuple[Cut | None, list[TensorCut]]:
        """Where the ranking and each tensor of a group with limits were cut.

        They are those that ``find_cuts`` finds, if there are no problems. Of a tensor that a limit
        held, ``num_ties`` and ``num_most`` are all elements that went with its threshold.
        """
        cut = self._cut()
        if not self._plan.groups[self._number].has_limits:
            return cut, []
        threshold = None if cut is None else cut.threshold
        tensors = []
        for position, boundary in sorted(self._boundaries.items()):
            last = boundary.last_pruned or Edge(0, -1, 0)
            held_at = _held_at(self._plan.tensors[position], boundary, threshold)
            key = last.key if held_at is not None or threshold is None else threshold
            tensors.append(TensorCut(position, key, held_at, last.num_ties, last.num_ties))
        return cut, tensors

    def _pairs(self) -> list[tuple[PlannedTensor, Boundary]]:
        return [(self._plan.tensors[p], boundary) for p, boundary in self._boundaries.items()]

    def _cut(self) -> Cut | None:
        """Where the ranking was cut; None if every tensor lost no more than its floor."""
        above_floor = [
            (boundary.last_pruned, boundary.num_pruned - tensor.lowest)
            for tensor, boundary in self._pairs()
            if boundary.last_pruned is not None and boundary.num_pruned > tensor.lowest
        ]
        if not above_floor:
            return None
        threshold = max(last.key for last, _ in above_floor)
        num_ties_pruned = sum(
            min(last.num_ties, num_free) for last, num_free in above_floor if last.key == threshold
        )
        num_ties = sum(_num_free_ties(*pair, threshold) for pair in self._pairs())
        return Cut(threshold, num_ties, num_ties_pruned)

    def _count_problems(self) -> list[str]:
        group = self._plan.groups[self._number]
        problems = [
            f"{tensor.entry.name}: {boundary.num_pruned} elements are pruned; the limits of "
            f"the recipe allow for {tensor.lowest} to {tensor.highest}."
            for tensor, boundary in self._pairs()
            if not tensor.lowest <= boundary.num_pruned <= tensor.highest
        ]
        total = sum(boundary.num_pruned for boundary in self._boundaries.values())
        total *= group.recipe.group_rule.tile_size
        if len(self._plan.groups) > 1 and total != group.num_to_prune:
            problems.append(
                f"{total} elements are pruned in group {self._number}; the recipe asks for "
                f"{group.num_to_prune}."
            )
        return problems

    def _order_problems(self) -> list[str]:
        is_tiled = self._plan.groups[self._number].recipe.tile is not None
        what = "tile" if is_tiled else "element"
        return [
            f"{printable(pruned.entry.name)}: {what} {last.place - pruned.offset} is pruned, but "
            f"comes after a kept one in the order of scores, which is {what} "
            f"{first.place - kept.offset} of {printable(kept.entry.name)}."
            for (pruned, last), (kept, first) in self._disordered()
        ]

    def _disordered(self) -> list[tuple[_Element, _Element]]:
        """Pairs of a pruned element and an earlier kept one that should have gone instead.

        Pairs in two tensors are looked for only if every tensor by itself is in order.
        """
        within = [
            ((tensor, boundary.last_pruned), (tensor, boundary.first_kept))
            for tensor, boundary in self._pairs()
            if not boundary.is_ordered and boundary.last_pruned and boundary.first_kept
        ]
        if within:
            return within
        could_stay = [
            (tensor, boundary.last_pruned)
            for tensor, boundary in self._pairs()
            if boundary.last_pruned and boundary.num_pruned > tensor.lowest
        ]
        could_go = [
            (tensor, boundary.first_kept)
            for tensor, boundary in self._pairs()
            if boundary.first_kept and boundary.num_pruned < tensor.highest
        ]
        if not could_stay or not could_go:
            return []
        last, first = max(could_stay, key=_edge_of), min(could_go, key=_edge_of)
        return [] if _edge_of(last) < _edge_of(first) else [(last, first)]


def _edge_of(element: _Element) -> Edge:
    return element[1]


def _num_free_ties(tensor: PlannedTensor, boundary: Boundary, threshold: int) -> int:
    """How many elements with the threshold no limit decides on."""
    last, first = boundary.last_pruned, boundary.first_kept
    if last is not None and last.key > threshold:  # a floor holds the tensor
        return 0
    num_pruned = last.num_ties if last is not None and last.key == threshold else 0
    num_kept = first.num_ties if first is not None and first.key == threshold else 0
    num_below = boundary.num_pruned - num_pruned

    def within_limits(count: int) -> int:
        return min(max(count, tensor.lowest), tensor.highest)

    return within_limits(boundary.num_pruned + num_kept) - within_limits(num_below)


def _held_at(tensor: PlannedTensor, boundary: Boundary, threshold: int | None) -> str | None:
    """The limit that decided how much a tensor lost, as ``TensorCut`` has it."""
    if threshold is None:
        return FLOOR
    largest = -1 if boundary.last_pruned is None else boundary.last_pruned.key
    if boundary.num_pruned == tensor.lowest and largest > threshold:
        return FLOOR
    if boundary.num_pruned == tensor.highest and largest < threshold:
        return CEILING
    return None
