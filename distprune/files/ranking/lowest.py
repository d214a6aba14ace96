"""The lowest elements: of rows that are in memory, or of a ranking whose threshold is known."""

from __future__ import annotations

import numpy as np

from distprune.files.ranking.keys import Array

# Shorter rows are not partitioned: to compare all pairs is five times as fast.
_FEW = 16


def lowest_in_rows(keys: Array, k: int) -> Array:
    """The k lowest keys of every row; among equal ones those further left.

    Args:
        keys: [rows, n].

    Returns:
        bool [rows, n], k of them True in each row.
    """
    if k == 0:
        return np.zeros(keys.shape, dtype=bool)
    if k == keys.shape[1]:
        return np.ones(keys.shape, dtype=bool)
    if keys.shape[1] <= _FEW:
        return _lowest_of_few(keys, k)
    threshold = np.partition(keys, k - 1, axis=1)[:, k - 1 : k]
    lowest = keys < threshold
    ties = keys == threshold
    num_missing = k - np.count_nonzero(lowest, axis=1, keepdims=True)
    if not np.array_equal(num_missing, np.count_nonzero(ties, axis=1, keepdims=True)):
        ties &= np.cumsum(ties, axis=1, dtype=np.int32) <= num_missing
    lowest |= ties
    return lowest


def _lowest_of_few(keys: Array, k: int) -> Array:
    """:func:`lowest_in_rows` by comparing all pairs of a row, in all rows at once."""
    columns = np.ascontiguousarray(keys.T)
    num_earlier = np.zeros(columns.shape, dtype=np.uint8)
    for left in range(len(columns)):
        for right in range(left + 1, len(columns)):
            is_lower = columns[right] < columns[left]
            num_earlier[left] += is_lower
            num_earlier[right] += ~is_lower
    return np.ascontiguousarray((num_earlier < k).T)


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
