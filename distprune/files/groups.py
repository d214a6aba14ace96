"""Groups of elements that are ranked each on its own: layers, rows, and N:M along the inputs."""

from __future__ import annotations

from dataclasses import dataclass

from distprune.files.planning import PlannedTensor
from distprune.files.policy import input_groups
from distprune.files.recipe import FileRecipe
from distprune.files.scores import Array, lowest_in_rows


@dataclass(frozen=True)
class Groups:
    """The groups of one tensor.

    Attributes:
        size: elements of a group.
        num_pruned: elements that each group loses.
        kernel: how far apart the elements of a group are; 1: they are neighbours.
        block: elements of the shortest run that holds whole groups.
    """

    size: int
    num_pruned: int
    kernel: int
    block: int

    def lowest(self, keys: Array) -> Array:
        """Which elements go.

        Args:
            keys: 1-d, of whole blocks.

        Returns:
            bool, like keys.
        """
        if self.kernel == 1:
            return lowest_in_rows(keys.reshape(-1, self.size), self.num_pruned).reshape(-1)
        # Along the inputs of a convolution, the groups of its kernel positions are interleaved.
        apart = keys.reshape(-1, self.size, self.kernel).swapaxes(1, 2)
        rows = lowest_in_rows(apart.reshape(-1, self.size), self.num_pruned)
        return rows.reshape(apart.shape).swapaxes(1, 2).reshape(-1)


def groups_of(tensor: PlannedTensor, recipe: FileRecipe) -> Groups:
    """The groups of a tensor that is not ranked together with others."""
    size = tensor.entry.numel // tensor.num_groups
    kernel = input_groups(tensor.entry)[2] if recipe.pattern is not None else 1
    return Groups(size, tensor.num_pruned_per_group, kernel, size * kernel)
