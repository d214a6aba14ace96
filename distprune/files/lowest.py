"""Which elements are pruned, tensor by tensor, once the rankings of a plan are cut."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from distprune.base.blocks import Blocks
from distprune.base.memory import Array, Scratch
from distprune.files.cuts import Cuts, cut_of_block, nan_error
from distprune.files.errors import SelectionError
from distprune.files.planning import CHUNK, MAX_IN_MEMORY
from distprune.files.reading import Source
from distprune.files.rewriting import Counts, Piece
from distprune.selection import cpu
from distprune.selection.candidates import Candidates, PartCut
from distprune.selection.cpu import lowest_of

# Which of some elements are kept.
_Decide = Callable[[range], Array]


class LowestElements:
    """Applies the cuts of a plan, and ranks the blocks that are ranked on their own.

    Args:
        source: of what to prune.
        cuts: of the groups that are ranked together.
    """

    def __init__(self, source: Source, cuts: Cuts) -> None:
        self._plan = source.plan
        self._source = source
        self._cuts = cuts
        self._scratch = Scratch()

    def pieces(self, position: int, counts: Counts) -> Iterator[Piece]:
        """The elements of a tensor, in their order.

        Args:
            position: of the tensor.
            counts: by position, it gets the NaN of tensors that are ranked on their own ("nan"),
                and the largest key that was pruned of those that are one block ("threshold").

        Raises:
            NaNError, SelectionError: of a tensor that is ranked on its own.
            CheckpointError: the source cannot be read, or has changed.
        """
        values = self._source.values[position]
        elements = range(self._plan.tensors[position].entry.numel)
        for stretch, step, decide in self._stretches(position, elements, counts):
            for start in range(stretch.start, stretch.stop, step):
                run = range(start, min(start + step, stretch.stop))
                with values.holding(run.start, run.stop) as bits:
                    keep = decide(run)
                yield Piece(run.start, bits, keep)

    def _stretches(
        self, position: int, elements: range, counts: Counts
    ) -> Iterator[tuple[range, int, _Decide]]:
        """Runs of elements, how many to decide on at a time, and how to decide."""
        tensor = self._plan.tensors[position]
        part = self._source.part(position, self._cuts.divisors[position])
        cut, blocks = self._cuts.tensors[position], tensor.blocks
        if blocks is None:
            assert cut is not None  # it is ranked together with others
            yield elements, CHUNK, functools.partial(self._after, part, cut)
        elif is_too_large(blocks):
            for start in range(elements.start, elements.stop, blocks.band):
                columns = ColumnCuts(part, start, blocks)
                decide = functools.partial(self._alone, part, position, counts, columns.lowest)
                yield range(start, start + blocks.band), columns.step, decide
        elif blocks.size <= MAX_IN_MEMORY:
            step = max(CHUNK // blocks.band, 1) * blocks.band
            lowest = functools.partial(lowest_of, blocks, scratch=self._scratch)
            yield elements, step, functools.partial(self._alone, part, position, counts, lowest)
        else:
            for start in range(elements.start, elements.stop, blocks.size):
                block = range(start, start + blocks.size)
                cut = cut_of_block(self._source, position, block, blocks.num_pruned)
                if tensor.num_blocks == 1 and blocks.num_pruned:
                    counts["threshold"][position] = cut.cut.threshold
                decide = functools.partial(self._after_in_block, part, position, counts, cut)
                yield block, CHUNK, decide

    def _after(self, part: Candidates, cut: PartCut, elements: range) -> Array:
        return cpu.kept_at(part, elements, cut.position, cut.cut, self._scratch)

    def _after_in_block(
        self, part: Candidates, position: int, counts: Counts, cut: PartCut, elements: range
    ) -> Array:
        keep = self._after(part, cut, elements)
        if self._plan.recipe.nan == "keep":
            self._count_nan(position, counts, self._keys(part, elements), ~keep)
        return keep

    def _alone(
        self,
        part: Candidates,
        position: int,
        counts: Counts,
        lowest_of: Callable[[Array], Array],
        elements: range,
    ) -> Array:
        """All but the lowest of a tensor's blocks; refuses or counts NaN, notes the threshold."""
        keys = self._keys(part, elements)
        lowest = lowest_of(keys)
        self._count_nan(position, counts, keys, lowest)
        if self._plan.tensors[position].num_blocks == 1 and lowest.any():
            largest = max(counts["threshold"][position], int(keys[lowest].max()))
            counts["threshold"][position] = largest
        return ~lowest

    def _keys(self, part: Candidates, elements: range) -> Array:
        keys: Array = part.keys.load(elements.start, elements.stop, self._scratch).values.numpy()
        return keys

    def _count_nan(self, position: int, counts: Counts, keys: Array, lowest: Array) -> None:
        key_range = self._source.key_ranges[position]
        is_nan = keys > key_range.largest_number
        num_nan = int(np.count_nonzero(is_nan)) if key_range.is_float else 0
        if not num_nan:
            return
        if self._plan.recipe.nan == "error":
            raise nan_error(self._plan, [position])
        counts["nan"][position] += num_nan
        if (is_nan & lowest).any():
            raise SelectionError(
                f"{self._plan.tensors[position].entry.name}: more of a group is to be pruned than "
                "is no NaN, and NaN are kept. Lower the sparsity, or exclude the tensor."
            )


def is_too_large(blocks: Blocks) -> bool:
    """Whether blocks are the columns of a band that is too large to rank in memory.

    The limit is half of that of a block that is a run: with the same limit, a process would take
    285 MB in all instead of 255 MB.
    """
    return blocks.columns > 1 and blocks.band > MAX_IN_MEMORY // 2


class ColumnCuts:
    """The cuts of all columns of one band, found and then applied.

    Args:
        part: the tensor.
        first: index of the band's first element.
        blocks: of the tensor.

    Cost: one read of the band.

    Raises:
        CheckpointError: the file cannot be read.
    """

    def __init__(self, part: Candidates, first: int, blocks: Blocks) -> None:
        self._part = part
        self._first = first
        self._blocks = blocks
        dtype = np.dtype(f"i{part.keys.dtype.itemsize}")
        self._thresholds = np.zeros((blocks.columns, 1), dtype=dtype)
        self._num_ties = np.zeros(blocks.columns, dtype=np.int64)
        self._find()

    @property
    def step(self) -> int:
        """How many elements to pass to :meth:`lowest` at a time: whole rows, about a chunk."""
        return max(CHUNK // self._blocks.stride, 1) * self._blocks.stride

    def _find(self) -> None:
        """Read the band once, column by column."""
        blocks = self._blocks
        if blocks.num_pruned == 0:
            return
        width = max(MAX_IN_MEMORY // 2 // blocks.size, 1)
        for column in range(0, blocks.columns, width):
            last = min(column + width, blocks.columns)
            keys = self._columns(column, last)
            step = max(CHUNK // blocks.size, 1)
            for start in range(0, last - column, step):
                rows = keys[:, start : start + step].swapaxes(0, 1).reshape(-1, blocks.size)
                rows.partition(blocks.num_pruned - 1, axis=1)
                thresholds = rows[:, blocks.num_pruned - 1 : blocks.num_pruned]
                columns = slice(column + start, column + start + len(rows))
                self._thresholds[columns] = thresholds
                num_below = np.count_nonzero(rows < thresholds, axis=1)
                self._num_ties[columns] = blocks.num_pruned - num_below

    def lowest(self, keys: Array) -> Array:
        """Which of the next elements are pruned.

        Args:
            keys: of whole rows, in their order.

        Returns:
            bool, like keys.
        """
        blocks = self._blocks
        rows = keys.reshape(-1, blocks.columns, blocks.kernel)
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
        blocks, scratch = self._blocks, Scratch()
        size = (last - first) * blocks.kernel
        keys = np.empty((blocks.length, size), dtype=self._thresholds.dtype)
        start = self._first + first * blocks.kernel
        for row in keys:
            row[:] = self._part.keys.load(start, start + size, scratch).values.numpy()
            start += blocks.stride
        return keys.reshape(blocks.length, last - first, blocks.kernel)
