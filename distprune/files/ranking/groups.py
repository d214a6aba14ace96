"""Groups of elements that are each ranked on their own: layers, rows, and N:M along the inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distprune.files.planning import PlannedTensor
from distprune.files.ranking.keys import Array
from distprune.files.ranking.lowest import lowest_in_rows
from distprune.files.recipe import FileRecipe

# Elements that are ranked at a time if groups are interleaved, because ranking copies them.
_STRIPE = 1 << 19


@dataclass(frozen=True)
class Groups:
    """The groups of one tensor.

    The tensor is a sequence of blocks [length, columns, kernel], row-major. A block has a group for
    each column; with one column, it is a group itself. N:M = 2:4 with inputs stored first, that is
    length 4, columns 3, kernel 1::

        a b c        elements of the same letter are one group of 4 inputs; each letter is the
        a b c        column of an output
        a b c
        a b c

    Attributes:
        length, columns, kernel: of a block.
        num_pruned: elements that each group loses.
    """

    length: int
    columns: int
    kernel: int
    num_pruned: int

    @property
    def size(self) -> int:
        """Elements of a group."""
        return self.length * self.kernel

    @property
    def block(self) -> int:
        """Elements of the shortest run of whole groups."""
        return self.size * self.columns

    @property
    def stride(self) -> int:
        """Elements of a block for one step along its length."""
        return self.columns * self.kernel

    def lowest(self, keys: Array) -> Array:
        """Which elements are pruned.

        Args:
            keys: 1-d, of whole blocks.

        Returns:
            bool, like keys.
        """
        if self.columns == 1:
            return lowest_in_rows(keys.reshape(-1, self.size), self.num_pruned).reshape(-1)
        blocks = keys.reshape(-1, self.length, self.columns, self.kernel)
        lowest = np.empty(blocks.shape, dtype=bool)
        num_blocks = max(_STRIPE // self.block, 1)
        num_columns = max(_STRIPE // self.size, 1)
        for first in range(0, len(blocks), num_blocks):
            for column in range(0, self.columns, num_columns):
                part = np.s_[first : first + num_blocks, :, column : column + num_columns]
                apart = blocks[part].swapaxes(1, 2)
                rows = lowest_in_rows(apart.reshape(-1, self.size), self.num_pruned)
                lowest[part] = rows.reshape(apart.shape).swapaxes(1, 2)
        return lowest.reshape(-1)


def groups_of(tensor: PlannedTensor, recipe: FileRecipe) -> Groups:
    """The groups of a tensor that is ranked on its own."""
    layout, num_pruned = tensor.layout, tensor.num_pruned_per_group
    if layout is None:
        return Groups(tensor.entry.numel // tensor.num_groups, 1, 1, num_pruned)
    if recipe.kept_of is not None:
        return Groups(recipe.kept_of[1], layout.stride, 1, num_pruned)
    if layout.columns == 1:
        return Groups(layout.inputs * layout.kernel, 1, 1, num_pruned)
    return Groups(layout.inputs, layout.columns, layout.kernel, num_pruned)
