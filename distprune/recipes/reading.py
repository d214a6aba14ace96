"""Read and check recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distprune._recipe_form.problems import KeyPath, Problems, RecipeError
from distprune._recipe_form.values import n_of_m, tile_of
from distprune._recipe_form.yaml_reading import read_yaml
from distprune.recipes.groups import RecipeGroup
from distprune.recipes.records import Recipe
from distprune.recipes.schedules import schedule_of
from distprune.recipes.shipped import shipped_recipes
from distprune.schedule.functions import OneShot, Schedule

if TYPE_CHECKING:
    from distprune._recipe_form.form import GroupForm


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe from a YAML file; needs PyYAML (``pip install 'distprune[recipes]'``).

    Args:
        path: of the file, or the name of a recipe that comes with distprune, such as "cubic_80".
            Relative paths in the recipe start at its folder.

    Raises:
        RecipeError: with every problem, its line, what was found and what was expected.
        FileNotFoundError: there is no such file.
        ImportError: PyYAML or pydantic is missing.
    """
    file = Path(path)
    if not file.exists():
        file = shipped_recipes().get(str(path), file)
    document, problems = read_yaml(file)
    recipe = _recipe(document, problems, str(path))
    statistics, scores = (
        None if value is None else str(file.parent / value)
        for value in (recipe.statistics, recipe.scores)
    )
    return replace(recipe, statistics=statistics, scores=scores)


def parse_recipe(mapping: Mapping[str, Any]) -> Recipe:
    """A recipe from plain values, as YAML or JSON would have them; needs pydantic.

    Raises:
        RecipeError: with every problem, what was found and what was expected.
        ImportError: pydantic is missing.
    """
    return _recipe(mapping, Problems(), "the recipe")


def _recipe(document: object, problems: Problems, where: str) -> Recipe:
    from distprune._recipe_form.imports import check

    form = check(document, problems, where)
    groups = []
    for i, group in enumerate(form.resolved()):
        own = form.groups[i] if form.groups else None
        groups.append(_group(group, own, () if own is None else ("groups", i), problems))
    if problems:
        raise RecipeError(where, problems.texts())
    return Recipe(
        groups=tuple(groups),
        seed=form.seed,
        scope=form.scope or "global",
        pattern=_n_of_m(form.pattern),
        nan=form.nan,
        masks=form.output.masks,
        card=form.output.card,
        version=form.version,
        statistics=form.statistics,
        scores=form.scores,
    )


def _group(
    group: GroupForm, own: GroupForm | None, path: KeyPath, problems: Problems
) -> RecipeGroup:
    """Make a group.

    Args:
        group: with what it has from the top level.
        own: as it is written; None: the recipe has no groups.
        path: of the group.
        problems: get what is wrong.
    """
    select, limits = group.select, group.limits
    return RecipeGroup(
        schedule=_schedule(group, path, problems),
        method=group.score or group.method or "magnitude",
        include=select.include,
        exclude=select.exclude,
        names=select.names,
        min_sparsity=0.0 if limits is None else limits.min_sparsity,
        max_sparsity=1.0 if limits is None else limits.max_sparsity,
        min_ndim=select.min_ndim,
        scope=None if own is None else own.scope,
        pattern=None if own is None else _n_of_m(own.pattern),
        tile=tile_of(group.pattern),
        also=select.also,
        input_dims=select.input_dims,
        normalize=None if group.normalize == "none" else group.normalize,
    )


def _schedule(group: GroupForm, path: KeyPath, problems: Problems) -> Schedule:
    if group.schedule is not None:
        try:
            return schedule_of(group.schedule.model_dump())
        except ValueError as error:  # values that do not go together
            problems.add((*path, "schedule"), str(error))
    kept_of = _n_of_m(group.pattern)
    if kept_of is not None:
        n, m = kept_of
        return OneShot(0, 1 - n / m)
    return OneShot(0, group.sparsity or 0.0)


def _n_of_m(pattern: str | None) -> tuple[int, int] | None:
    """The pattern N:M; None without one, and of tiles."""
    return None if pattern is None or tile_of(pattern) is not None else n_of_m(pattern)
