"""Groups that are each ranked on their own: layers, rows, and N:M along the inputs; tiles."""

from __future__ import annotations

from distprune._common.element_groups import Groups
from distprune.files.planning import PlannedTensor
from distprune.files.ranking.tiles import Bands
from distprune.files.recipe import FileRecipe


def groups_of(tensor: PlannedTensor, recipe: FileRecipe) -> Groups:
    """The groups of a tensor that is ranked on its own; of its tiles, if the recipe has any."""
    return recipe.group_rule.groups(tensor.entry.numel, tensor.layout, tensor.num_pruned_per_group)


def bands_of(tensor: PlannedTensor, recipe: FileRecipe) -> Bands | None:
    """The bands of a tensor whose tiles are ranked; None if its elements are."""
    if recipe.tile is None:
        return None
    assert tensor.layout is not None
    return Bands.of(tensor.layout, recipe.tile)
