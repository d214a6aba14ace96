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
from dataclasses import dataclass

import numpy as np

from distprune.files.planning import Plan, PlannedTensor
from distprune.files.scores import Array
from distprune.files.searching import Cut, TensorCut


@dataclass(frozen=True)
class Ends:
    """The last pruned and the first kept element of a tensor, or of a part of it.

    Attributes:
        top: the largest key of a pruned element; None if nothing is pruned.
        num_top: pruned elements with this key.
        last_top: place of the last of them in the ranking.
        bottom: the smallest key of a kept element; None if nothing is kept.
        num_bottom: kept elements with this key.
        first_bottom: place of the first of them.
        num_pruned: elements.
    """

    top: int | None = None
    num_top: int = 0
    last_top: int = -1
    bottom: int | None = None
    num_bottom: int = 0
    first_bottom: int = -1
    num_pruned: int = 0

    @classmethod
    def of(cls, keys: Array, keep: Array, first: int) -> Ends:
        """Those of a run of elements.

        Args:
            keys: 1-d.
            keep: bool, like keys.
            first: place of the first element.
        """
        pruned, kept = keys[~keep], keys[keep]
        top = bottom = None
        tops = bottoms = np.zeros(1, dtype=np.int64)
        if len(pruned):
            top = int(pruned.max())
            tops = np.flatnonzero((keys == keys.dtype.type(top)) & ~keep)
        if len(kept):
            bottom = int(kept.min())
            bottoms = np.flatnonzero((keys == keys.dtype.type(bottom)) & keep)
        return cls(
            top, len(tops), first + int(tops[-1]), bottom, len(bottoms), first + int(bottoms[0]),
            len(pruned),
        )  # fmt: skip

    def with_more(self, other: Ends) -> Ends:
        """Those of both runs together."""
        tops = [each for each in (self, other) if each.top is not None]
        bottoms = [each for each in (self, other) if each.bottom is not None]
        top = max((each.top for each in tops), default=None)
        bottom = min((each.bottom for each in bottoms), default=None)
        tops = [each for each in tops if each.top == top]
        bottoms = [each for each in bottoms if each.bottom == bottom]
        return Ends(
            top=top,
            num_top=sum(each.num_top for each in tops),
            last_top=max((each.last_top for each in tops), default=-1),
            bottom=bottom,
            num_bottom=sum(each.num_bottom for each in bottoms),
            first_bottom=min((each.first_bottom for each in bottoms), default=-1),
            num_pruned=self.num_pruned + other.num_pruned,
        )


class GroupOrder:
    """Checks a group of tensors that are ranked together.

    Args:
        plan: what the masks are to be.
        number: of the group.
        ends: by position of a tensor, what others have found; more can be added.

    Memory: a few numbers for each tensor. No threshold is needed, and none is trusted.
    """

    def __init__(self, plan: Plan, number: int, ends: Mapping[int, Ends] | None = None) -> None:
        self._plan = plan
        self._number = number
        self._ends = dict(ends or {})

    def add(self, position: int, first: int, keys: Array, keep: Array) -> None:
        """Take in a piece of a tensor, in any order of pieces.

        Args:
            position: of the tensor.
            first: index of the first element.
            keys: 1-d, in the format of the group.
            keep: bool, like keys.
        """
        found = Ends.of(keys, keep, self._plan.tensors[position].offset + first)
        self._ends[position] = self._ends.get(position, Ends()).with_more(found)

    def problems(self) -> list[str]:
        """All that is wrong; to be asked once all tensors have been taken in."""
        return [*self._count_problems(), *self._order_problems()]

    def cuts(self) -> tuple[Cut | None, list[TensorCut]]:
        """Where the ranking and each tensor of a group with limits were cut.

        They are those that ``decide`` finds, if there are no problems; of a tensor that a limit
        held, ``num_ties`` and ``num_most`` are all that went with its threshold.
        """
        pairs = [(self._plan.tensors[p], ends) for p, ends in sorted(self._ends.items())]
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
        for position, ends in sorted(self._ends.items()):
            held_at = _held_at(self._plan.tensors[position], ends, threshold)
            key = threshold if held_at is None else ends.top
            tensors.append(TensorCut(position, key or 0, held_at, ends.num_top, ends.num_top))
        return cut, tensors

    def _count_problems(self) -> list[str]:
        group = self._plan.groups[self._number]
        problems = []
        for position, ends in self._ends.items():
            tensor = self._plan.tensors[position]
            if not tensor.lowest <= ends.num_pruned <= tensor.highest:
                problems.append(
                    f"{tensor.entry.name}: {ends.num_pruned} elements are pruned; the limits of "
                    f"the recipe allow for {tensor.lowest} to {tensor.highest}."
                )
        total = sum(ends.num_pruned for ends in self._ends.values())
        if len(self._plan.groups) > 1 and total != group.num_to_prune:
            problems.append(
                f"{total} elements are pruned in group {self._number}; the recipe asks for "
                f"{group.num_to_prune}."
            )
        return problems

    def _order_problems(self) -> list[str]:
        wrong = [p for p, ends in self._ends.items() if _is_wrong(ends, ends)]
        if not wrong:
            wrong = self._wrong_between()
        return [
            f"{self._plan.tensors[position].entry.name}: an element is pruned that comes after a "
            "kept one in the order of scores."
            for position in wrong
        ]

    def _wrong_between(self) -> list[int]:
        tensors, ends = self._plan.tensors, self._ends
        could_keep = [p for p in ends if ends[p].num_pruned > tensors[p].lowest]
        could_lose = [p for p in ends if ends[p].num_pruned < tensors[p].highest]
        if not could_keep or not could_lose:
            return []
        last = max(could_keep, key=lambda p: (ends[p].top, ends[p].last_top))
        first = min(could_lose, key=lambda p: (ends[p].bottom, ends[p].first_bottom))
        return [last] if _is_wrong(ends[last], ends[first]) else []


def _is_wrong(pruned: Ends, kept: Ends) -> bool:
    """Whether the last pruned element of one comes after the first kept one of another."""
    if pruned.top is None or kept.bottom is None:
        return False
    return (pruned.top, pruned.last_top) > (kept.bottom, kept.first_bottom)


def _num_free(tensor: PlannedTensor, ends: Ends, threshold: int) -> int:
    """How many elements with the threshold no limit decides on."""
    if ends.top is not None and ends.top > threshold:  # a floor holds the tensor
        return 0
    num_pruned = ends.num_top if ends.top == threshold else 0
    num_kept = ends.num_bottom if ends.bottom == threshold else 0
    below = ends.num_pruned - num_pruned

    def within(count: int) -> int:
        return min(max(count, tensor.lowest), tensor.highest)

    return within(ends.num_pruned + num_kept) - within(below)


def _held_at(tensor: PlannedTensor, ends: Ends, threshold: int | None) -> str | None:
    """The limit that decided how much a tensor lost, as ``TensorCut`` has it."""
    if threshold is None:
        return "min_sparsity"
    top = -1 if ends.top is None else ends.top
    if ends.num_pruned == tensor.lowest and top > threshold:
        return "min_sparsity"
    if ends.num_pruned == tensor.highest and top < threshold:
        return "max_sparsity"
    return None
