"""Whether elements were cut in the order of a ranking, and where: found from keys and a mask alone.

[Note: derived cut] A ranking was cut in its order if every pruned element comes before every kept
one, by (key, place). That needs neither the cut nor the count beforehand: the last pruned element
and the first kept one tell it. Both are found in one read, in any pieces, and the findings of two
pieces combine into those of both, so that ranks can look at different elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distprune.files.scores import Array


class Ranking:
    """What is known of the elements of one ranking that have been shown.

    Show every element once, in any order of pieces; the places say where they stand.

    Attributes:
        num_pruned: elements.
    """

    def __init__(self, state: Sequence[int | None] | None = None) -> None:
        # Of the largest pruned key: how many pruned elements have it, and the place of the last.
        self._top: int | None = None
        self._num_top, self._last_top = 0, -1
        # Of the smallest kept key: how many kept elements have it, and the place of the first.
        self._bottom: int | None = None
        self._num_bottom, self._first_bottom = 0, -1
        self.num_pruned = 0
        if state is not None:
            self._load(state)

    @property
    def threshold(self) -> int | None:
        """The largest pruned key; None if nothing is pruned."""
        return self._top

    @property
    def is_ordered(self) -> bool:
        """Whether every pruned element comes before every kept one."""
        if self._top is None or self._bottom is None or self._top < self._bottom:
            return True
        return self._top == self._bottom and self._last_top < self._first_bottom

    @property
    def last_and_first(self) -> tuple[int, int]:
        """Places of the last pruned element and the first kept one, if there are both."""
        return self._last_top, self._first_bottom

    @property
    def num_ties_pruned(self) -> int:
        """Pruned elements with the key ``threshold``."""
        return self._num_top

    @property
    def num_ties(self) -> int:
        """All elements with the key ``threshold``, if ``is_ordered``."""
        return self._num_top + (self._num_bottom if self._bottom == self._top else 0)

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
            if self._top is None or top >= self._top:
                places = _places(keys, top, ~keep)
                self._raise_top(top, len(places), first + int(places[-1]))
        if num_kept:
            one = keys.dtype.type(1)
            bottom = int(((keys + one) * keep - one).min())  # pruned ones wrap to the largest
            if self._bottom is None or bottom <= self._bottom:
                places = _places(keys, bottom, keep)
                self._lower_bottom(bottom, len(places), first + int(places[0]))
        self.num_pruned += len(keys) - num_kept

    def merge(self, other: Ranking) -> None:
        """Add what another one was shown: other elements of the same ranking."""
        if other._top is not None:
            self._raise_top(other._top, other._num_top, other._last_top)
        if other._bottom is not None:
            self._lower_bottom(other._bottom, other._num_bottom, other._first_bottom)
        self.num_pruned += other.num_pruned

    def state(self) -> list[int | None]:
        """All that is known, as JSON, for ``Ranking(state)``."""
        top = [self._top, self._num_top, self._last_top]
        return [*top, self._bottom, self._num_bottom, self._first_bottom, self.num_pruned]

    def _raise_top(self, key: int, count: int, last: int) -> None:
        if self._top is None or key > self._top:
            self._top, self._num_top, self._last_top = key, count, last
        elif key == self._top:
            self._num_top += count
            self._last_top = max(self._last_top, last)

    def _lower_bottom(self, key: int, count: int, first: int) -> None:
        if self._bottom is None or key < self._bottom:
            self._bottom, self._num_bottom, self._first_bottom = key, count, first
        elif key == self._bottom:
            self._num_bottom += count
            self._first_bottom = min(self._first_bottom, first)

    def _load(self, state: Sequence[int | None]) -> None:
        top, bottom, self.num_pruned = state[:3], state[3:6], state[6]  # type: ignore[assignment]
        self._top, self._num_top, self._last_top = top  # type: ignore[assignment]
        self._bottom, self._num_bottom, self._first_bottom = bottom  # type: ignore[assignment]


def _places(keys: Array, key: int, among: Array) -> Array:
    """Where elements have a key, of those that are True in ``among``."""
    return np.flatnonzero((keys == keys.dtype.type(key)) & among)
