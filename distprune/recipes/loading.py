"""Recipes from YAML files, and the files that come with distprune."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from distprune.recipes.recipe import Recipe

_MAX_BYTES = 1_000_000  # more than any recipe needs


def load_recipe(path: str | Path) -> Recipe:
    """A recipe from a YAML file.

    Args:
        path: of the file, or the name of a recipe that comes with distprune, such as "cubic_80".
            Relative paths in the recipe start at its folder.

    Raises:
        ValueError: there is no such file, or it is no recipe; names every key that is wrong.
        OSError: the file cannot be read.
    """
    return make_recipe(read_keys(path), str(path))


def make_recipe(keys: dict[str, Any], name: str) -> Recipe:
    """A recipe from the keys of a file.

    Args:
        keys: with their values.
        name: of the recipe, for the message of an error.

    Raises:
        ValueError: with every key that is wrong.
    """
    try:
        return Recipe(**keys)
    except ValidationError as error:
        raise ValueError(
            "\n  - ".join([f"the recipe {name} is wrong:", *problems_of(error)])
        ) from error


def problems_of(error: ValidationError, label: Callable[[str], str] = str) -> list[str]:
    """A sentence for each value that is wrong; ``label`` turns its key into how it is called."""
    problems = []
    for each in error.errors(include_url=False):
        text = each["msg"].removeprefix("Value error, ")
        if each["loc"]:
            key, *rest = map(str, each["loc"])
            text = f"{'.'.join([label(key), *rest])}: {text}, found {str(each['input'])[:60]!r}"
        problems.append(f"{text}.")
    return problems


def read_keys(path: str | Path) -> dict[str, Any]:
    """The keys of a YAML file, or of a shipped recipe, with their values unchecked.

    Raises:
        ValueError: there is no such file, or it is no YAML, or no mapping; names the file.
        OSError: the file cannot be read.
    """
    file = Path(path)
    if not file.exists():
        shipped = shipped_recipes()
        if str(path) not in shipped:
            raise ValueError(
                f"{path} is neither a file nor a shipped recipe; expected a YAML file, or one of "
                f"{', '.join(shipped)}."
            )
        file = shipped[str(path)]
    with file.open("rb") as stream:
        text = stream.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError(f"{path} has more than {_MAX_BYTES:,} bytes; expected a recipe.")
    try:
        keys = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no valid YAML: {error}") from error
    if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"{path} is no recipe; expected keys with values, such as sparsity: 0.5.")
    for name in ("statistics", "scores"):
        if isinstance(keys.get(name), str):
            keys[name] = str(file.parent / keys[name])
    return keys


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, and aliases: a few of them can expand to any size."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases are not read; a pattern that begins with * needs quotes",
                problem_mark=self.get_mark(),
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        values = super().construct_mapping(node, deep)
        if len(values) < len(node.value):
            raise yaml.MarkedYAMLError(problem="a key is given twice", problem_mark=node.start_mark)
        return values


def shipped_recipes() -> dict[str, Path]:
    """The files of the recipes that come with distprune by name, in order."""
    folder = Path(str(resources.files("distprune.recipes") / "shipped"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
