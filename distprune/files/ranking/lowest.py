"""The lowest elements of a ranking whose threshold is known."""

from __future__ import annotations

import numpy as np

from distprune.files.ranking.keys import Array


class Quota:
    """How many ties may still be pruned; several thresholds may share it."""

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left

    def take(self, most: int) -> int:
        """Take as many as there are left, at most ``most``."""
        taken = min(most, self.num_left)
        self.num_left -= taken
        return taken


class Threshold:
    """A cut of the total order: it prunes smaller keys, and the first of those that tie with it.

    Pass the elements to :meth:`lowest` in their order.

    Args:
        key: smaller ones are pruned.
        quota: how many of the ties are pruned.
        stop: keys from ``key`` to this one, without it, tie; None: only ``key`` itself.
    """

    def __init__(self, key: int, quota: Quota, stop: int | None = None) -> None:
        self._key = key
        self._stop = stop
        self._quota = quota

    def lowest(self, keys: Array) -> Array:
        """bool, like keys, 1-d: which of the next elements are pruned."""
        lowest: Array = keys < keys.dtype.type(self._key)
        if self._quota.num_left:
            ties = self._ties(keys)
            lowest[ties[: self._quota.take(len(ties))]] = True
        return lowest

    def _ties(self, keys: Array) -> Array:
        """The indices of keys that tie with the threshold."""
        key = keys.dtype.type(self._key)
        if self._stop is None:
            return np.flatnonzero(keys == key)
        return np.flatnonzero((keys >= key) & (keys < keys.dtype.type(self._stop)))
