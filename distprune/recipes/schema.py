"""The JSON schema of recipes."""

from __future__ import annotations

from typing import Any


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of a recipe, as plain values; needs pydantic.

    Raises:
        ImportError: pydantic is missing.
    """
    from distprune._recipe_form.imports import recipe_schema

    return recipe_schema()
