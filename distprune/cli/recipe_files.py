"""Recipes by name or path: those that come with distprune, and files of one's own."""

from __future__ import annotations

from pathlib import Path

from distprune.files.errors import SelectionError
from distprune.recipe import Recipe, load_recipe, shipped_recipes


def complete(incomplete: str) -> list[str]:
    """Names of shipped recipes for the shell, which completes names of files by itself."""
    return [name for name in shipped_recipes() if name.startswith(incomplete)]


def find(name: str) -> Path:
    """A recipe's file: the name of a shipped one, or a path.

    Raises:
        SelectionError: there is neither.
    """
    known = shipped_recipes()
    if name in known:
        return known[name]
    path = Path(name)
    if not path.is_file():
        raise SelectionError(
            f"{name!r} is no file and no shipped recipe; expected a YAML file, or one of "
            f"{', '.join(known)}.",
        )
    return path


def read(name: str) -> Recipe:
    """A checked recipe, by path or name.

    Raises:
        SelectionError: there is no such recipe, a package is missing, or the recipe is wrong;
            with every problem.
    """
    path = find(name)
    try:
        return load_recipe(path)
    except ImportError as error:
        raise SelectionError(
            "recipes need PyYAML and pydantic: pip install 'distprune[cli]'"
        ) from error
    except ValueError as error:
        raise SelectionError(str(error)) from error
    except OSError as error:
        raise SelectionError(f"{path} cannot be read: {error.strerror}.") from error
