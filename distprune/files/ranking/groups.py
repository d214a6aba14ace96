"""Groups of elements that are each ranked on their own: layers, rows, and N:M along the inputs."""

from __future__ import annotations

from distprune._common.element_groups import Groups
from distprune.files.planning import PlannedTensor
from distprune.files.recipe import FileRecipe


def groups_of(tensor: PlannedTensor, recipe: FileRecipe) -> Groups:
    """The groups of a tensor that is ranked on its own."""
    return recipe.group_rule.groups(tensor.entry.numel, tensor.layout, tensor.num_pruned_per_group)
