"""The lowest keys of every group of a tensor, in memory: see element_groups.py."""

from __future__ import annotations

import numpy as np

from distprune._common.element_groups import Groups

Array = np.ndarray

# Elements that are ranked at a time if groups are interleaved, because ranking copies them.
_STRIPE = 1 << 19
# Shorter rows are not partitioned: to compare all pairs is five times as fast.
_FEW = 16


def lowest_of(groups: Groups, keys: Array) -> Array:
    """Which elements of groups are pruned.

    Args:
        groups: of one tensor.
        keys: 1-d, of whole blocks.

    Returns:
        bool, like keys.
    """
    if groups.columns == 1:
        return lowest_in_rows(keys.reshape(-1, groups.size), groups.num_pruned).reshape(-1)
    blocks = keys.reshape(-1, groups.length, groups.columns, groups.kernel)
    lowest = np.empty(blocks.shape, dtype=bool)
    num_blocks = max(_STRIPE // groups.block, 1)
    num_columns = max(_STRIPE // groups.size, 1)
    for first in range(0, len(blocks), num_blocks):
        for column in range(0, groups.columns, num_columns):
            part = np.s_[first : first + num_blocks, :, column : column + num_columns]
            apart = blocks[part].swapaxes(1, 2)
            rows = lowest_in_rows(apart.reshape(-1, groups.size), groups.num_pruned)
            lowest[part] = rows.reshape(apart.shape).swapaxes(1, 2)
    return lowest.reshape(-1)


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
