"""Whether masks are those of one ranking, within limits: judged by the weights and the masks alone.

[Note: one ranking] Each tensor has to lose its own lowest elements: the last pruned one comes
before the first kept one. Between tensors, let A be one that lost more than its floor, and B one
that lost less than its ceiling. If the last pruned element of A came after the first kept one of B,
the two could be exchanged for a lower sum of ranks. So masks with the right counts are those of
the ranking if and only if the last pruned element of all such A comes before the first kept one
of all such B. Elements are compared by (key, position of the tensor, index), so ties count.
"""

from __future__ import annotations

import numpy as np

from distprune.files.planning import Plan
from distprune.files.scores import Array

# Key, position, index.
_Place = tuple[int, int, int]


class GroupOrder:
    """Checks a group of tensors that are ranked together.

    Args:
        plan: what the masks are to be.
        number: of the group.

    Memory: a few numbers for each tensor. No threshold is needed, and none is trusted.
    """

    def __init__(self, plan: Plan, number: int) -> None:
        self._plan = plan
        self._number = number
        self._num_pruned: dict[int, int] = {}
        self._last_pruned: dict[int, _Place] = {}
        self._first_kept: dict[int, _Place] = {}

    def add(self, position: int, first: int, keys: Array, keep: Array) -> None:
        """Take in a piece of a tensor.

        Args:
            position: of the tensor.
            first: index of the first element.
            keys: 1-d, in the format of the group.
            keep: bool, like keys.
        """
        pruned, kept = keys[~keep], keys[keep]
        self._num_pruned[position] = self._num_pruned.get(position, 0) + len(pruned)
        if len(pruned):
            key = pruned.max()
            index = first + int(np.flatnonzero((keys == key) & ~keep)[-1])
            place = (int(key), position, index)
            self._last_pruned[position] = max(place, self._last_pruned.get(position, place))
        if len(kept):
            key = kept.min()
            index = first + int(np.flatnonzero((keys == key) & keep)[0])
            place = (int(key), position, index)
            self._first_kept[position] = min(place, self._first_kept.get(position, place))

    def problems(self) -> list[str]:
        """All that is wrong; to be asked once all tensors have been taken in."""
        return [*self._count_problems(), *self._order_problems()]

    def _count_problems(self) -> list[str]:
        group = self._plan.groups[self._number]
        problems = []
        for position, count in self._num_pruned.items():
            tensor = self._plan.tensors[position]
            if not tensor.lowest <= count <= tensor.highest:
                problems.append(
                    f"{tensor.entry.name}: {count} elements are pruned; the limits of the recipe "
                    f"allow for {tensor.lowest} to {tensor.highest}."
                )
        total = sum(self._num_pruned.values())
        if len(self._plan.groups) > 1 and total != group.num_to_prune:
            problems.append(
                f"{total} elements are pruned in group {self._number}; the recipe asks for "
                f"{group.num_to_prune}."
            )
        return problems

    def _order_problems(self) -> list[str]:
        wrong = [p for p in self._last_pruned if self._is_before(p, p)]
        if not wrong:
            wrong = self._wrong_between()
        return [
            f"{self._plan.tensors[position].entry.name}: an element is pruned that comes after a "
            "kept one in the order of scores."
            for position in wrong
        ]

    def _wrong_between(self) -> list[int]:
        counts, tensors = self._num_pruned, self._plan.tensors
        could_keep = [p for p in self._last_pruned if counts[p] > tensors[p].lowest]
        could_lose = [p for p in self._first_kept if counts[p] < tensors[p].highest]
        if not could_keep or not could_lose:
            return []
        last = max(could_keep, key=self._last_pruned.__getitem__)
        first = min(could_lose, key=self._first_kept.__getitem__)
        return [last] if self._is_before(first, last) else []

    def _is_before(self, kept: int, pruned: int) -> bool:
        """Whether a tensor's first kept element comes before the last pruned one of another."""
        first = self._first_kept.get(kept)
        return first is not None and first < self._last_pruned[pruned]
