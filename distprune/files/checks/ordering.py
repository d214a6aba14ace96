"""Whether elements were cut in the order of a ranking, and where: found from keys and a mask alone.

[Note: derived cut] A ranking was cut in its order if every pruned element comes before every kept
one, by (key, place). That needs neither the cut nor the count beforehand: the last pruned element
and the first kept one tell it. Both are found in one read, in any pieces, and the findings of two
pieces combine into those of both, so that ranks can look at different elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distprune.files.ranking.scores import Array


class Ranking:
    """What is known of the elements of one ranking that have been shown.

    Show every element once, in any order of pieces; the places say where they stand.

    Attributes:
        top: the largest key of a pruned element; None if nothing is pruned.
        num_top: pruned elements with this key.
        last_top: the place of the last of them.
        bottom: the smallest key of a kept element; None if nothing is kept.
        num_bottom: kept elements with this key.
        first_bottom: the place of the first of them.
        num_pruned: elements.
    """

    def __init__(self, state: Sequence[int | None] | None = None) -> None:
        self.top: int | None = None
        self.num_top, self.last_top = 0, -1
        self.bottom: int | None = None
        self.num_bottom, self.first_bottom = 0, -1
        self.num_pruned = 0
        if state is not None:
            self._load(state)

    @property
    def is_ordered(self) -> bool:
        """Whether every pruned element comes before every kept one."""
        if self.top is None or self.bottom is None or self.top < self.bottom:
            return True
        return self.top == self.bottom and self.last_top < self.first_bottom

    def add(self, keys: Array, keep: Array, first: int) -> None:
        """Show the next elements.

        Args:
            keys: 1-d, unsigned integers whose highest bit is 0.
            keep: bool, like keys.
            first: the place of the first of them in the ranking; the others follow it.
        """
        num_kept = int(np.count_nonzero(keep))
        # Arithmetic hides the other elements: twenty times as fast as to pick elements by a mask.
        if num_kept < len(keys):
            pruned = keys * ~keep  # kept ones are 0, and so no larger than a pruned one
            top = int(pruned.max())
            if self.top is None or top >= self.top:
                places = _places(keys, top, ~keep)
                self._raise_top(top, len(places), first + int(places[-1]))
        if num_kept:
            one = keys.dtype.type(1)
            bottom = int(((keys + one) * keep - one).min())  # pruned ones wrap to the largest
            if self.bottom is None or bottom <= self.bottom:
                places = _places(keys, bottom, keep)
                self._lower_bottom(bottom, len(places), first + int(places[0]))
        self.num_pruned += len(keys) - num_kept

    def merge(self, other: Ranking) -> None:
        """Add what another one was shown: other elements of the same ranking."""
        if other.top is not None:
            self._raise_top(other.top, other.num_top, other.last_top)
        if other.bottom is not None:
            self._lower_bottom(other.bottom, other.num_bottom, other.first_bottom)
        self.num_pruned += other.num_pruned

    def state(self) -> list[int | None]:
        """All that is known, as JSON, for ``Ranking(state)``."""
        top = [self.top, self.num_top, self.last_top]
        return [*top, self.bottom, self.num_bottom, self.first_bottom, self.num_pruned]

    def _raise_top(self, key: int, count: int, last: int) -> None:
        if self.top is None or key > self.top:
            self.top, self.num_top, self.last_top = key, count, last
        elif key == self.top:
            self.num_top += count
            self.last_top = max(self.last_top, last)

    def _lower_bottom(self, key: int, count: int, first: int) -> None:
        if self.bottom is None or key < self.bottom:
            self.bottom, self.num_bottom, self.first_bottom = key, count, first
        elif key == self.bottom:
            self.num_bottom += count
            self.first_bottom = min(self.first_bottom, first)

    def _load(self, state: Sequence[int | None]) -> None:
        top, bottom, self.num_pruned = state[:3], state[3:6], state[6]  # type: ignore[assignment]
        self.top, self.num_top, self.last_top = top  # type: ignore[assignment]
        self.bottom, self.num_bottom, self.first_bottom = bottom  # type: ignore[assignment]


def _places(keys: Array, key: int, among: Array) -> Array:
    """Where elements have a key, of those that are True in ``among``."""
    return np.flatnonzero((keys == keys.dtype.type(key)) & among)
