"""Groups that are the columns of a block too large for memory.

In a matrix that is stored [in, out], one output sums over a column. A few columns at a time are
read, a piece of each row, and cut; of each column only its threshold is kept, and how many of the
elements equal to it are pruned. Then the block is read once more, in its order, and pruned.
"""

from __future__ import annotations

import numpy as np

from distprune._common.element_groups import Groups
from distprune._common.memory import Array, Scratch
from distprune.files.ranking.reads import CHUNK, MAX_IN_MEMORY
from distprune.selection.candidates import Candidates


def is_too_large(groups: Groups) -> bool:
    """Whether groups are columns of blocks that are too large to rank in memory.

    The limit is half of that of a group that is a run: with the same limit, a process would take
    285 MB in all instead of 255 MB.
    """
    return groups.columns > 1 and groups.block > MAX_IN_MEMORY // 2


class ColumnCuts:
    """The cuts of all columns of one block, found and then applied.

    Args:
        part: the tensor.
        first: index of the block's first item.
        groups: of the tensor.

    Cost: one read of the block.

    Raises:
        CheckpointError: the file cannot be read.
    """

    def __init__(self, part: Candidates, first: int, groups: Groups) -> None:
        self._part = part
        self._first = first
        self._groups = groups
        dtype = np.dtype(f"i{part.keys.dtype.itemsize}")
        self._thresholds = np.zeros((groups.columns, 1), dtype=dtype)
        self._num_ties = np.zeros(groups.columns, dtype=np.int64)
        self._find()

    @property
    def step(self) -> int:
        """How many elements to pass to :meth:`lowest` at a time: whole rows, about a chunk."""
        return max(CHUNK // self._groups.stride, 1) * self._groups.stride

    def _find(self) -> None:
        """Read the block once, column by column."""
        groups = self._groups
        if groups.num_pruned == 0:
            return
        width = max(MAX_IN_MEMORY // 2 // groups.size, 1)
        for column in range(0, groups.columns, width):
            last = min(column + width, groups.columns)
            keys = self._columns(column, last)
            step = max(CHUNK // groups.size, 1)
            for start in range(0, last - column, step):
                rows = keys[:, start : start + step].swapaxes(0, 1).reshape(-1, groups.size)
                rows.partition(groups.num_pruned - 1, axis=1)
                thresholds = rows[:, groups.num_pruned - 1 : groups.num_pruned]
                columns = slice(column + start, column + start + len(rows))
                self._thresholds[columns] = thresholds
                num_below = np.count_nonzero(rows < thresholds, axis=1)
                self._num_ties[columns] = groups.num_pruned - num_below

    def lowest(self, keys: Array) -> Array:
        """Which of the next elements are pruned.

        Args:
            keys: of whole rows, in their order.

        Returns:
            bool, like keys.
        """
        groups = self._groups
        rows = keys.reshape(-1, groups.columns, groups.kernel)
        lowest: Array = rows < self._thresholds
        if self._num_ties.any():
            ties = rows == self._thresholds
            count = np.count_nonzero(ties, axis=(0, 2))
            over = np.flatnonzero(count > self._num_ties)
            if len(over):  # of these columns, the first ones only
                apart = ties[:, over].swapaxes(0, 1)
                own = apart.reshape(len(over), -1)
                own = own & (np.cumsum(own, axis=1, dtype=np.int32) <= self._num_ties[over, None])
                ties[:, over] = own.reshape(apart.shape).swapaxes(0, 1)
            self._num_ties -= np.minimum(count, self._num_ties)
            lowest |= ties
        return lowest.reshape(-1)

    def _columns(self, first: int, last: int) -> Array:
        """Keys [length, columns, kernel] of some columns."""
        groups, scratch = self._groups, Scratch()
        size = (last - first) * groups.kernel
        keys = np.empty((groups.length, size), dtype=self._thresholds.dtype)
        start = self._first + first * groups.kernel
        for row in keys:
            row[:] = self._part.keys.load(start, start + size, scratch).values.numpy()
            start += groups.stride
        return keys.reshape(groups.length, last - first, groups.kernel)
