"""Which elements are pruned, span by span, once the rankings of a plan are cut."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from distprune._common.blocks import Blocks
from distprune._common.memory import Array, Scratch
from distprune.files.cuts import Cuts, cut_of_one_group, nan_error
from distprune.files.errors import SelectionError
from distprune.files.planning import Plan
from distprune.files.reading import CHUNK, MAX_IN_MEMORY, Source, groups_of
from distprune.files.rewriting import Counts, Piece
from distprune.files.units import Span
from distprune.selection import cpu
from distprune.selection.candidates import Candidates, PartCut
from distprune.selection.cpu import lowest_of
from distprune.selection.passes import natively


class _Stretch(NamedTuple):
    """Items [first, last) of a tensor that are decided by one function, so many at a time."""

    first: int
    last: int
    step: int
    decide: Callable[[range], Array]


class LowestElements:
    """Applies the cuts of a plan, and ranks the groups that are ranked on their own.

    Args:
        plan: what to prune.
        source: of the plan.
        cuts: of the groups that are ranked together.
    """

    def __init__(self, plan: Plan, source: Source, cuts: Cuts) -> None:
        self._plan = plan
        self._source = source
        self._cuts = cuts
        self._scratch = Scratch()
        self._num_nan: dict[int, int] = {}
        self._thresholds: dict[int, int] = {}

    def take_counts(self) -> Counts:
        """By position: the NaN in the pieces since the last call, of tensors that are ranked on
        their own, and the largest key that was pruned, of tensors that are one group.
        """
        counts = {"nan": self._num_nan, "threshold": self._thresholds}
        self._num_nan, self._thresholds = {}, {}
        return counts

    def pieces(self, span: Span) -> Iterator[Piece]:
        """The elements of a span, in their order.

        Raises:
            NaNError, SelectionError: of a tensor that is ranked on its own.
            CheckpointError: the source cannot be read, or has changed.
        """
        source, position = self._source, span.position
        bands = source.bands(position)
        size = 1 if bands is None else bands.tile_size
        for first, last, step, decide in self._stretches(
            position, span.first // size, span.last // size
        ):
            for start in range(first, last, step):
                items = range(start, min(start + step, last))
                if bands is None:
                    bits = source.read_bits(position, items.start, items.stop)
                    with source.holding(position, items.start, bits):
                        lowest = decide(items)
                    yield Piece(items.start, bits, lowest)
                    continue
                # A run of many tiles has more elements than fit into memory.
                for index, lowest in bands.spread(decide(items), items.start * size, CHUNK):
                    bits = source.read_bits(position, index, index + len(lowest))
                    yield Piece(index, bits, lowest)

    def _stretches(self, position: int, first: int, last: int) -> Iterator[_Stretch]:
        tensor, recipe = self._plan.tensors[position], self._plan.recipe_of(position)
        bands = self._source.bands(position)
        part = self._source.part(position)
        step, whole = CHUNK, 1
        if bands is not None:
            step, whole = max(CHUNK // bands.size, 1) * bands.num_tiles, bands.tile_size
        if recipe.is_global:
            cut = self._cuts.tensors[position]
            assert cut is not None
            yield _Stretch(first, last, step, functools.partial(self._before, *natively(part, cut)))
            return
        groups = groups_of(tensor, recipe)
        if is_too_large(groups):
            for start in range(first, last, groups.band):
                columns = ColumnCuts(part, start, groups)
                rows = step if bands is not None else columns.step
                decide = functools.partial(self._in_columns, part, position, columns)
                yield _Stretch(start, start + groups.band, rows, decide)
        elif groups.size <= MAX_IN_MEMORY:
            step = max(CHUNK // (groups.band * whole), 1) * groups.band
            decide = functools.partial(self._in_memory, part, position, groups)
            yield _Stretch(first, last, step, decide)
        else:
            for start in range(first, last, groups.size):
                group = range(start, start + groups.size)
                cut = cut_of_one_group(self._plan, self._source, position, group, groups.num_pruned)
                if tensor.num_groups == 1 and groups.num_pruned:
                    self._thresholds[position] = cut.cut.threshold
                decide = functools.partial(self._before_in_group, part, position, cut)
                yield _Stretch(group.start, group.stop, step, decide)

    def _before(self, part: Candidates, cut: PartCut, items: range) -> Array:
        keep = cpu.kept_at(part, items, cut.position, cut.cut, self._scratch)
        lowest: Array = np.logical_not(keep, out=keep)
        return lowest

    def _before_in_group(
        self, part: Candidates, position: int, cut: PartCut, items: range
    ) -> Array:
        lowest = self._before(part, cut, items)
        if self._plan.recipe.nan == "keep":
            self._count_nan(position, self._keys(part, items), lowest)
        return lowest

    def _in_memory(self, part: Candidates, position: int, groups: Blocks, items: range) -> Array:
        keys = self._keys(part, items)
        return self._checked(position, keys, lowest_of(groups, keys, self._scratch))

    def _in_columns(
        self, part: Candidates, position: int, columns: ColumnCuts, items: range
    ) -> Array:
        keys = self._keys(part, items)
        return self._checked(position, keys, columns.lowest(keys))

    def _keys(self, part: Candidates, items: range) -> Array:
        keys: Array = part.keys.load(items.start, items.stop, self._scratch).values.numpy()
        return keys

    def _checked(self, position: int, keys: Array, lowest: Array) -> Array:
        """Refuse or count NaN in a tensor that is ranked on its own, and note its threshold."""
        self._count_nan(position, keys, lowest)
        if self._plan.tensors[position].num_groups == 1 and lowest.any():
            largest = max(self._thresholds.get(position, 0), int(keys[lowest].max()))
            self._thresholds[position] = largest
        return lowest

    def _count_nan(self, position: int, keys: Array, lowest: Array) -> None:
        key_range = self._source.key_range(position)
        is_nan = keys > key_range.largest_number
        num_nan = int(np.count_nonzero(is_nan)) if key_range.is_float else 0
        if not num_nan:
            return
        if self._plan.recipe.nan == "error":
            raise nan_error(self._plan, [position])
        self._num_nan[position] = self._num_nan.get(position, 0) + num_nan
        if (is_nan & lowest).any():
            raise SelectionError(
                f"{self._plan.tensors[position].entry.name}: more of a group is to be pruned than "
                "is no NaN, and NaN are kept. Lower the sparsity, or exclude the tensor."
            )


def is_too_large(groups: Blocks) -> bool:
    """Whether groups are columns of blocks that are too large to rank in memory.

    The limit is half of that of a group that is a run: with the same limit, a process would take
    285 MB in all instead of 255 MB.
    """
    return groups.columns > 1 and groups.band > MAX_IN_MEMORY // 2


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

    def __init__(self, part: Candidates, first: int, groups: Blocks) -> None:
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
