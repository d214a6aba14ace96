"""Recipes of tests."""

from __future__ import annotations

from typing import Any

from distprune.recipes import GroupRecipe, Recipe


def raw_recipe(sparsity: float | None = None, scope: str = "global", **keys: Any) -> Recipe:
    """Return a recipe that ranks raw scores unless its keys say otherwise."""
    if groups := keys.get("groups"):
        return Recipe(**{**keys, "groups": [_group_of(each) for each in groups]})
    keys |= {"scope": scope} if sparsity is None else {"scope": scope, "sparsity": sparsity}
    recipe = Recipe(**keys)
    if not recipe.is_normalizable or recipe.normalize is not None:
        return recipe
    return Recipe(**{**keys, "normalize": "none"})


def _group_of(keys: dict[str, Any] | Recipe) -> GroupRecipe:
    recipe = keys if isinstance(keys, Recipe) else raw_recipe(**keys)
    return GroupRecipe(**{key: getattr(recipe, key) for key in recipe.model_fields_set})
