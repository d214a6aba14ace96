"""Sections of a recipe, as they are written."""

from __future__ import annotations

from typing import Any


def select_mapping(
    include: object, also: object, exclude: object, input_dims: object
) -> dict[str, Any]:
    """The section ``select``, without the keys that are left out by default.

    Values of wrong types are written as they are, so that a check of what is written names them.
    """
    values: dict[str, Any] = {}

    if include is not None:
        values["include"] = _listed(include)
    if also not in ((), []):
        values["also"] = _listed(also)
    if exclude not in ((), []):
        values["exclude"] = _listed(exclude)
    if input_dims not in ((), [], {}):
        try:
            pairs: dict[Any, object] = dict(input_dims)  # type: ignore[call-overload]
        except (TypeError, ValueError):
            values["input_dims"] = input_dims
        else:
            values["input_dims"] = {pattern: _listed(dims) for pattern, dims in pairs.items()}
    return values


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
