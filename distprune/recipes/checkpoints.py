"""Recipes for checkpoints: the same files as for models, without what only training has.

recipe = load_file_recipe("recipe.yaml")
prune(plan("Llama-3-8B", recipe), "Llama-3-8B-sparse")
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distprune.files.errors import SelectionError
from distprune.files.recipe import FileRecipe
from distprune.recipes.groups import RecipeGroup
from distprune.recipes.reading import load_recipe
from distprune.recipes.records import Recipe
from distprune.schedule.functions import OneShot


def load_file_recipe(path: str | Path) -> FileRecipe:
    """Read a recipe for a checkpoint from a YAML file; needs PyYAML.

    Raises:
        RecipeError: with every problem, its line, what was found and what was expected.
        SelectionError: the recipe has what a checkpoint has no use for.
        FileNotFoundError: there is no such file.
        ImportError: PyYAML is missing.
    """
    return file_recipe(load_recipe(path), str(path))


def file_recipe(recipe: Recipe, name: str) -> FileRecipe:
    """A checked recipe as one for a checkpoint.

    Args:
        recipe: as ``load_recipe`` or ``parse_recipe`` returns it.
        name: of the recipe, for messages.

    Raises:
        SelectionError: it has what a checkpoint has no use for; names all of that.
    """
    return FileRecipe(**fields_of(recipe, name))


def fields_of(recipe: Recipe, name: str) -> dict[str, Any]:
    """A checked recipe as arguments of :class:`FileRecipe`; see :func:`file_recipe`."""
    problems = []
    if any(not isinstance(group.schedule, OneShot) for group in recipe.groups):
        problems.append("schedule")
    if any(group.names != ("weight",) for group in recipe.groups):
        problems.append("select.names")
    if problems:
        raise SelectionError(
            f"the recipe {name} has {', '.join(problems)}, which a checkpoint has no use for: it "
            "is pruned at once, and patterns match whole names of tensors. Expected 'sparsity' or "
            "'pattern', and 'select' with 'include' and 'exclude'.",
        )
    groups = [_fields_of_group(recipe, group) for group in recipe.groups]
    budgets = groups[0] if len(groups) == 1 else {"groups": groups}
    return {
        **budgets,
        "seed": recipe.seed,
        "nan": recipe.nan,
        "masks": recipe.masks,
        "card": recipe.card,
        "statistics": recipe.statistics,
        "scores": recipe.scores,
    }


def _fields_of_group(recipe: Recipe, group: RecipeGroup) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "score": group.method, "include": group.include, "also": group.also,
        "exclude": group.exclude, "input_dims": group.input_dims,
    }  # fmt: skip
    if group.min_ndim is not None:
        fields["min_ndim"] = group.min_ndim
    pattern = group.pattern or recipe.pattern
    if pattern is not None:
        return fields | {"pattern": "{}:{}".format(*pattern)}
    limits = {"min_sparsity": group.min_sparsity, "max_sparsity": group.max_sparsity}
    scope = group.scope or recipe.scope
    if group.is_normalizable(recipe.scope):
        fields["normalize"] = group.normalize
    if group.tile is not None:
        tile = "{}x{}".format(*group.tile)
        return fields | {"pattern": tile, "scope": scope, "sparsity": group.schedule.ends_at}
    return fields | {"scope": scope, "sparsity": group.schedule.ends_at, **limits}
