"""The one import of pydantic, when the first recipe is checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distprune._recipe_form.form import RecipeForm
    from distprune._recipe_form.problems import Problems


def check(document: object, problems: Problems, where: str) -> RecipeForm:
    """Check a recipe; see :func:`distprune._recipe_form.checking.check`.

    Raises:
        ImportError: pydantic is missing.
        RecipeError: with every problem.
    """
    _need_pydantic()
    from distprune._recipe_form import checking

    return checking.check(document, problems, where)


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of a recipe.

    Raises:
        ImportError: pydantic is missing.
    """
    _need_pydantic()
    from distprune._recipe_form import schema

    return schema.recipe_schema()


def _need_pydantic() -> None:
    try:
        import pydantic  # noqa: F401
    except ImportError as error:
        raise ImportError("recipes need pydantic: pip install 'distprune[recipes]'") from error
