"""The boundary between pruned and kept elements of a ranking, found from keys and a mask alone.

[Note: derived cut] A ranking was cut in its order if every pruned element comes before every kept
one, by (key, place). Neither the threshold nor the count has to be known: it is enough to compare
the last pruned element with the first kept one::

    place in the ranking    0  1  2  3  4  5  6  7
    key                     3  5  1  5  9  5  2  5
    mask (. = pruned)       .  .  .  1  1  1  .  1
                               ^     ^
                               |     first kept: (5, 3), one of 3 kept ties
                               last pruned: (5, 1), before (5, 3), so the cut is in order

Both are found in one read of the elements, in any order of pieces, and the boundaries of two sets
of elements combine into that of their union, so each rank can read a part.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distprune.files.ranking.keys import Array


class Edge(NamedTuple):
    """The last pruned element of a ranking, or its first kept one; ordered by (key, place).

    Attributes:
        key: of the element.
        place: of the element in the ranking.
        num_ties: elements of the same side (pruned, or kept) that have this key.
    """

    key: int
    place: int
    num_ties: int


# num_pruned, last_pruned and first_kept of a Boundary.
State = tuple[int, Edge | None, Edge | None]


class Boundary:
    """What pieces of a ranking and of its mask say of where it was cut.

    Add every element once, in any order of pieces.

    Attributes:
        num_pruned: elements.
        last_pruned: None if nothing is pruned.
        first_kept: None if nothing is kept.
    """

    def __init__(
        self, num_pruned: int = 0, last_pruned: Edge | None = None, first_kept: Edge | None = None
    ) -> None:
        self.num_pruned = num_pruned
        self.last_pruned = last_pruned
        self.first_kept = first_kept

    @property
    def is_ordered(self) -> bool:
        """Whether every pruned element comes before every kept one."""
        if self.last_pruned is None or self.first_kept is None:
            return True
        return self.last_pruned < self.first_kept

    def add(self, keys: Array, keep: Array, first: int) -> None:
        """Add consecutive elements.

        Args:
            keys: 1-d, unsigned integers whose highest bit is 0.
            keep: bool, like keys.
            first: the place of the first of them in the ranking.
        """
        num_kept = int(np.count_nonzero(keep))
        # Arithmetic hides the other side: twenty times as fast as to pick elements by a mask.
        if num_kept < len(keys):
            top = int((keys * ~keep).max())  # kept ones are 0, so no larger than a pruned one
            if self.last_pruned is None or top >= self.last_pruned.key:
                ties = _ties(keys, top, ~keep)
                self._add_pruned(Edge(top, first + int(ties[-1]), len(ties)))
        if num_kept:
            one = keys.dtype.type(1)
            bottom = int(((keys + one) * keep - one).min())  # pruned ones wrap to the largest
            if self.first_kept is None or bottom <= self.first_kept.key:
                ties = _ties(keys, bottom, keep)
                self._add_kept(Edge(bottom, first + int(ties[0]), len(ties)))
        self.num_pruned += len(keys) - num_kept

    def merge(self, other: Boundary) -> None:
        """Add the boundary of other elements of the same ranking."""
        if other.last_pruned is not None:
            self._add_pruned(other.last_pruned)
        if other.first_kept is not None:
            self._add_kept(other.first_kept)
        self.num_pruned += other.num_pruned

    def state(self) -> State:
        """All attributes, as JSON can hold them."""
        return self.num_pruned, self.last_pruned, self.first_kept

    @classmethod
    def from_state(cls, state: State) -> Boundary:
        """The boundary that :meth:`state` was called on, after a round trip through JSON or not."""
        num_pruned, last_pruned, first_kept = state
        return cls(
            num_pruned,
            None if last_pruned is None else Edge(*last_pruned),
            None if first_kept is None else Edge(*first_kept),
        )

    def _add_pruned(self, edge: Edge) -> None:
        if self.last_pruned is None or edge.key > self.last_pruned.key:
            self.last_pruned = edge
        elif edge.key == self.last_pruned.key:
            key, place, num_ties = self.last_pruned
            self.last_pruned = Edge(key, max(place, edge.place), num_ties + edge.num_ties)

    def _add_kept(self, edge: Edge) -> None:
        if self.first_kept is None or edge.key < self.first_kept.key:
            self.first_kept = edge
        elif edge.key == self.first_kept.key:
            key, place, num_ties = self.first_kept
            self.first_kept = Edge(key, min(place, edge.place), num_ties + edge.num_ties)


def _ties(keys: Array, key: int, candidates: Array) -> Array:
    """The indices of elements that have a key, among those that are True in ``candidates``."""
    return np.flatnonzero((keys == keys.dtype.type(key)) & candidates)
