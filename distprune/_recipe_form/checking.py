"""Check a recipe by its form; every mistake becomes a text that names the key and the value."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from pydantic import ValidationError

from distprune._recipe_form.form import (
    GroupForm,
    LimitsForm,
    OneShotForm,
    OutputForm,
    RampForm,
    RecipeForm,
    Section,
    SelectForm,
)
from distprune._recipe_form.problems import KeyPath, Problems, RecipeError
from distprune._recipe_form.rules import check_keys, check_nulls, check_values
from distprune._recipe_form.values import choice_text, listed

_SECTIONS: dict[str, tuple[type[Section], ...]] = {
    "select": (SelectForm,),
    "limits": (LimitsForm,),
    "output": (OutputForm,),
}
_SCHEDULES: dict[str, tuple[type[Section], ...]] = {
    "one_shot": (OneShotForm,), "linear": (RampForm,), "cubic": (RampForm,)
}  # fmt: skip


class _Error(TypedDict, total=False):
    """What pydantic says about one mistake."""

    type: str
    loc: tuple[int | str, ...]
    input: Any
    ctx: dict[str, Any]


def check(document: object, problems: Problems, where: str) -> RecipeForm:
    """Check a recipe.

    Args:
        document: plain values, as from YAML or JSON.
        problems: those that are known already.
        where: what the recipe is called in the message.

    Raises:
        RecipeError: with every problem.
    """
    document = _plain(document)
    recipe = None
    check_nulls(document, problems)
    if isinstance(document, dict):
        check_keys(document, problems)
    try:
        recipe = RecipeForm.model_validate(document)
    except ValidationError as error:
        for mistake in error.errors(include_url=False):
            _add(mistake, document, problems)
    if recipe is not None and not problems:
        check_values(recipe, problems)
    if problems or recipe is None:
        raise RecipeError(where, problems.texts())
    return recipe


def _plain(value: object) -> object:
    """Mappings of any kind as dicts, which is what pydantic takes."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _add(mistake: Any, document: object, problems: Problems) -> None:
    """Add what pydantic says in our words."""
    error: _Error = mistake
    path, kind, context = _path(error["loc"], document), error["type"], error.get("ctx", {})
    found = f"found {shown(error['input'])}."
    if error["input"] is None and path:
        return  # it has no value, or one that could not be read
    if kind == "problem":
        key = context["key"]
        problems.add(path if key is None else (*path, key), context["text"])
    elif kind == "missing":
        problems.add(path, f"has no {str(error['loc'][-1])!r}, which is needed.")
    elif kind in ("extra_forbidden", "invalid_key"):
        problems.add(path, _unknown(path[-1], _keys(path[:-1], document)))
    elif kind == "union_tag_not_found":
        problems.add(path, "has no 'kind', which is needed.")
    elif kind == "union_tag_invalid":
        _add_wrong_kind(path, error["input"], problems)
    elif kind == "expected":
        problems.add(path, f"expected {context['text']}, {found}")
    else:
        problems.add(path, f"expected a mapping with {listed(_keys(path, document))}, {found}")


def _add_wrong_kind(path: KeyPath, schedule: Mapping[str, Any], problems: Problems) -> None:
    kind = schedule["kind"]
    kinds = choice_text(tuple(_SCHEDULES), kind)
    problems.add((*path, "kind"), f"expected {kinds}, found {shown(kind)}.")
    keys = _all_keys((OneShotForm, RampForm))
    for key in schedule:
        if key not in keys:
            problems.add((*path, key), _unknown(key, keys))


def _path(location: Sequence[int | str], document: object) -> KeyPath:
    """The part of a location that is in the document: pydantic adds kinds and missing keys."""
    path: list[int | str] = []
    value: Any = document
    for key in location:
        is_key = isinstance(value, dict) and key in value
        if is_key or (isinstance(value, list) and isinstance(key, int) and key < len(value)):
            value = value[key]
            path.append(key)
    return tuple(path)


def _keys(path: KeyPath, document: object) -> tuple[str, ...]:
    """The keys that the mapping at a path may have."""
    if not path:
        return _all_keys((RecipeForm,))
    if isinstance(path[-1], int):
        return _all_keys((GroupForm,))
    if path[-1] != "schedule":
        return _all_keys(_SECTIONS[path[-1]])
    value: Any = document
    for key in path:
        value = value[key]
    kind = value.get("kind") if isinstance(value, dict) else None
    return _all_keys(_SCHEDULES.get(str(kind), (OneShotForm, RampForm)))


def _all_keys(forms: Sequence[type[Section]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(key for form in forms for key in form.model_fields))


def _unknown(key: object, keys: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(str(key), keys, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown key.{hint} Expected {listed(keys)}."


def shown(value: object) -> str:
    """A value and its type, for a message; shortened if it is long."""
    text = repr(value)
    return f"{text if len(text) < 80 else text[:76] + ' ...'} ({type(value).__name__})"
