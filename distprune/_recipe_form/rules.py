"""Rules about keys that exclude or need each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distprune._recipe_form.form import GroupForm, RecipeForm
from distprune._recipe_form.problems import KeyPath, Problems
from distprune._recipe_form.values import FROM_STATISTICS, tile_of

_AMOUNTS = ("sparsity", "pattern", "schedule")


def check_nulls(document: object, problems: Problems, path: KeyPath = ()) -> None:
    """Check that every key has a value: the form takes None for a key that is left out.

    Args:
        document: plain values.
        problems: get what is wrong; a value that has a problem already gets no other.
        path: of the document inside of a larger one.
    """
    if document is None and path and not problems.has(path):
        problems.add(path, "has no value; give it one, or leave the key out.")
    elif isinstance(document, dict):
        for key, value in document.items():
            check_nulls(value, problems, (*path, key))


def check_keys(document: Mapping[str, Any], problems: Problems) -> None:
    """Check which keys stand beside each other; their values may be wrong.

    Args:
        document: a recipe as plain values.
        problems: get what is wrong.
    """
    groups = document.get("groups")
    tables: list[tuple[KeyPath, Any]] = [((), document)]
    if isinstance(groups, list | tuple) and groups:
        tables += [(("groups", i), group) for i, group in enumerate(groups)]
        if "select" in document:
            problems.add(("select",), "goes into each of the groups, if there are any.")
        if "pattern" in document:
            problems.add(("groups",), _beside_pattern)
    has_groups = len(tables) > 1
    for path, table in tables:
        if not isinstance(table, Mapping):
            continue
        _check_table(table, path, problems)
        has_amount = _has_amount(table)
        if has_groups:
            has_amount |= path == () or _has_amount(document)
        if not has_amount and "groups" not in table:
            problems.add(path, "has no 'sparsity', 'pattern' or 'schedule'; expected one of them.")


def _has_amount(table: Mapping[str, Any]) -> bool:
    is_tiled = tile_of(table.get("pattern")) is not None
    return any(key in table for key in _AMOUNTS if not (is_tiled and key == "pattern"))


_beside_pattern = "has no place beside 'pattern', which says how much and where."


def _check_table(table: Mapping[str, Any], path: KeyPath, problems: Problems) -> None:
    if "score" in table and "method" in table:
        text = "is given beside 'score', and means the same; leave it out."
        problems.add((*path, "method"), text)
    is_tiled = tile_of(table.get("pattern")) is not None
    if is_tiled and "limits" in table:
        text = "has no place beside a pattern of tiles, which is ranked without limits."
        problems.add((*path, "limits"), text)
    if "pattern" in table and not is_tiled:
        for key in ("sparsity", "schedule", "scope", "limits"):
            if key in table:
                problems.add((*path, key), _beside_pattern)
    elif "sparsity" in table and "schedule" in table:
        text = "is given beside 'sparsity'; expected one of the two."
        problems.add((*path, "schedule"), text)


def check_values(recipe: RecipeForm, problems: Problems) -> None:
    """Check values that have no effect beside others; each of them is right by itself.

    Args:
        recipe: whose keys and values are right.
        problems: get what is wrong.
    """
    groups = recipe.resolved()
    for i, group in enumerate(groups):
        path: KeyPath = ("groups", i) if recipe.groups else ()
        _check_limits(group, path, problems)
        _check_normalize(group, path, problems)
    is_used = any(group.is_normalizable for group in groups)
    if recipe.groups and recipe.normalize not in (None, "none") and not is_used:
        problems.add(("normalize",), "has no effect in any of the groups; leave it out.")
    ranked_by = {group.score or group.method for group in groups}
    for key, scores in (("statistics", FROM_STATISTICS), ("scores", ("given",))):
        if getattr(recipe, key) is not None and ranked_by.isdisjoint(scores):
            text = f"has no effect without score {' or '.join(map(repr, scores))}; leave it out."
            problems.add((key,), text)
    is_random = any("random" in (group.score, group.method) for group in groups)
    if recipe.seed is not None and not is_random:
        problems.add(("seed",), "has no effect without score 'random'; leave it out.")


def _check_limits(group: GroupForm, path: KeyPath, problems: Problems) -> None:
    if group.limits is not None and group.limits.has_effect and group.scope in ("layer", "row"):
        problems.add(
            (*path, "limits"),
            f"has no effect with scope {group.scope!r}, where every tensor loses the same share; "
            "leave it out, or rank all tensors together (scope 'global').",
        )


def _check_normalize(group: GroupForm, path: KeyPath, problems: Problems) -> None:
    if group.normalize in (None, "none") or group.is_normalizable:
        return
    if group.pattern is not None and not group.is_n_of_m:
        beside = "beside a pattern of tiles, whose scores are sums of raw magnitudes"
    elif group.pattern is not None:
        beside = "beside a pattern, which compares weights of one tensor"
    elif group.scope in ("layer", "row"):
        beside = f"with scope {group.scope!r}, which compares weights of one tensor"
    else:
        beside = "with score 'random', which does not depend on the weights"
    problems.add((*path, "normalize"), f"has no effect {beside}; leave it out.")
