"""Recipes by name or path: shipped ones, and files of the user."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from distprune.files.errors import SelectionError
from distprune.recipes.request import Request, shipped_recipes

R = TypeVar("R", bound=Request)


def complete(incomplete: str) -> list[str]:
    """Names of shipped recipes, for completion; the shell completes names of files by itself."""
    return [name for name in shipped_recipes() if name.startswith(incomplete)]


def find(name: str) -> Path:
    """The file of a recipe, by the name of a shipped one or by path.

    Raises:
        SelectionError: there is neither.
    """
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    path = Path(name)
    if not path.is_file():
        raise SelectionError(
            f"{name!r} is neither a file nor a shipped recipe; expected a YAML file, or one of "
            f"{', '.join(shipped)}.",
        )
    return path


def read(name: str, kind: type[R]) -> R:
    """A checked recipe of a kind, for models or for checkpoints, by path or name.

    Raises:
        SelectionError: there is no such recipe, a package is missing, or the recipe is wrong;
            with every problem.
    """
    path = find(name)
    try:
        return kind.load(path)
    except ImportError as error:
        raise SelectionError(
            "recipes need PyYAML and pydantic: pip install 'distprune[cli]'"
        ) from error
    except ValueError as error:
        raise SelectionError(str(error)) from error
    except OSError as error:
        raise SelectionError(f"{path} cannot be read: {error.strerror}.") from error
