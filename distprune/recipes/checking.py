"""Read a recipe from YAML, and check it by its form and by its rules.

Every mistake names the key and the value and, in a file, the line.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from pydantic import ValidationError

from distprune.recipes import (
    BUDGET_FROM_STATISTICS,
    FROM_FILES,
    FROM_STATISTICS,
    KeyPath,
    Problems,
    RecipeError,
    is_tiled,
)
from distprune.recipes.form import (
    GroupForm,
    LimitsForm,
    OneShotForm,
    OutputForm,
    RampForm,
    RecipeForm,
    Section,
    SelectForm,
    choice_text,
    listed,
)

# More than any recipe needs.
_MAX_BYTES = 1_000_000
_MAX_DEPTH = 16


def read_yaml(path: Path) -> tuple[Any, Problems]:
    """Read a YAML file as plain values, with the line of each key; repeated keys are problems.

    Aliases are refused, because a small file with aliases can expand to any amount of data. So are
    large files and deep nesting.

    Raises:
        ImportError: PyYAML is missing.
        ValueError: the file is not YAML, or larger or deeper than a recipe can be; names the file.
        OSError: the file cannot be read.

    Cost: some seconds for a file of one megabyte, which is the largest that is read.
    """
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            f"{path}: reading YAML needs PyYAML: pip install 'distprune[recipes]'. "
            "parse_recipe(mapping) does not."
        ) from error
    loader: Any = None
    lines: dict[KeyPath, int] = {}
    problems = Problems(lines)
    try:
        loader = yaml.SafeLoader(_read_text(path))
        _refuse_excess(yaml, loader, path)
        node = loader.get_single_node()
        value = None if node is None else _build(loader, node, (), lines, problems)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no valid YAML: {error}") from error
    finally:
        if loader is not None:
            loader.dispose()
    return value, problems


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        raw = file.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise ValueError(f"{path} has more than {_MAX_BYTES:,} bytes; expected a recipe.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no text in UTF-8 (byte {error.start}); expected a recipe."
        ) from error


def _refuse_excess(yaml: Any, loader: Any, path: Path) -> None:
    """Make a loader raise ValueError at the first alias, and where nesting is too deep."""
    compose, depth = loader.compose_node, 0

    def compose_node(parent: Any, index: Any) -> Any:
        nonlocal depth
        line = loader.peek_event().start_mark.line + 1
        if loader.check_event(yaml.AliasEvent):
            raise ValueError(
                f"{path}, line {line}: an alias (*{loader.peek_event().anchor[:40]}); expected "
                "values that are written out, because aliases are not read. Patterns that begin "
                "with * need quotes."
            )
        if depth == _MAX_DEPTH:
            raise ValueError(
                f"{path}, line {line}: nested more than {_MAX_DEPTH} levels; expected a recipe."
            )
        depth += 1
        node = compose(parent, index)
        depth -= 1
        return node

    loader.compose_node = compose_node


def _build(
    loader: Any, node: Any, path: KeyPath, lines: dict[KeyPath, int], problems: Problems
) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if node.id == "sequence":
        return [
            _build(loader, item, (*path, i), lines, problems) for i, item in enumerate(node.value)
        ]
    if node.id == "scalar":
        try:
            return loader.construct_object(node)
        except (ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # Impossible dates, numbers with too many digits, tags that do not fit the value.
            problems.add(path, f"cannot be read ({str(error)[:80]}); expected another value.")
            return None
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.id != "scalar":
            problems.append((line, f"line {line}: expected a text as a key."))
            continue
        key = key_node.value
        inner = (*path, key)
        if key in values:
            problems.add(inner, f"given again in line {line}; expected every key once.")
            continue
        lines[inner] = line
        values[key] = _build(loader, value_node, inner, lines, problems)
    return values


_SECTIONS: dict[str, tuple[type[Section], ...]] = {
    "select": (SelectForm,),
    "limits": (LimitsForm,),
    "output": (OutputForm,),
}
_SCHEDULES: dict[str, tuple[type[Section], ...]] = {
    "one_shot": (OneShotForm,), "linear": (RampForm,), "cubic": (RampForm,)
}  # fmt: skip
_AMOUNTS = ("sparsity", "pattern", "schedule")
_BESIDE_PATTERN = "has no place beside 'pattern', which says how much and where."


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
    _check_nulls(document, problems)
    if isinstance(document, dict):
        _check_keys(document, problems)
    try:
        recipe = RecipeForm.model_validate(document)
    except ValidationError as error:
        for mistake in error.errors(include_url=False):
            _add(mistake, document, problems)
    if recipe is not None and not problems:
        _check_values(recipe, problems)
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


def _check_nulls(document: object, problems: Problems, path: KeyPath = ()) -> None:
    """Check that every key has a value: the form takes None for a key that is left out."""
    if document is None and path and not problems.has(path):
        problems.add(path, "has no value; give it one, or leave the key out.")
    elif isinstance(document, dict):
        for key, value in document.items():
            _check_nulls(value, problems, (*path, key))


def _check_keys(document: Mapping[str, Any], problems: Problems) -> None:
    """Check which keys stand beside each other; their values may be wrong."""
    groups = document.get("groups")
    tables: list[tuple[KeyPath, Any]] = [((), document)]
    if isinstance(groups, list | tuple) and groups:
        tables += [(("groups", i), group) for i, group in enumerate(groups)]
        if "select" in document:
            problems.add(("select",), "goes into each of the groups, if there are any.")
        if "pattern" in document:
            problems.add(("groups",), _BESIDE_PATTERN)
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
    has_tiles = is_tiled(table.get("pattern"))
    return any(key in table for key in _AMOUNTS if not (has_tiles and key == "pattern"))


def _check_table(table: Mapping[str, Any], path: KeyPath, problems: Problems) -> None:
    if "score" in table and "method" in table:
        text = "is given beside 'score', and means the same; leave it out."
        problems.add((*path, "method"), text)
    has_tiles = is_tiled(table.get("pattern"))
    for key, kind in (("limits", "limits"), ("budget", "a budget")):
        if has_tiles and key in table:
            text = f"has no place beside a pattern of tiles, which is ranked without {kind}."
            problems.add((*path, key), text)
    if "pattern" in table and not has_tiles:
        for key in ("sparsity", "schedule", "scope", "budget", "limits"):
            if key in table:
                problems.add((*path, key), _BESIDE_PATTERN)
    elif "sparsity" in table and "schedule" in table:
        text = "is given beside 'sparsity'; expected one of the two."
        problems.add((*path, "schedule"), text)


def _check_values(recipe: RecipeForm, problems: Problems) -> None:
    """Check values that have no effect beside others; each of them is right by itself."""
    groups = recipe.resolved()
    for i, group in enumerate(groups):
        path: KeyPath = ("groups", i) if recipe.groups else ()
        _check_share(group, path, problems)
        _check_normalize(group, path, problems)
    is_used = any(group.is_normalizable for group in groups)
    if recipe.groups and recipe.normalize not in (None, "none") and not is_used:
        problems.add(("normalize",), "has no effect in any of the groups; leave it out.")
    ranked_by = {group.score or group.method for group in groups}
    of_budget = any(group.budget == BUDGET_FROM_STATISTICS for group in groups)
    if recipe.statistics is not None and ranked_by.isdisjoint(FROM_STATISTICS) and not of_budget:
        text = f"score {listed(FROM_STATISTICS)}, or budget {BUDGET_FROM_STATISTICS!r}"
        problems.add(("statistics",), f"has no effect without {text}; leave it out.")
    if recipe.scores is not None and ranked_by.isdisjoint(FROM_FILES):
        text = f"has no effect without score {listed(FROM_FILES)}; leave it out."
        problems.add(("scores",), text)
    is_random = any("random" in (group.score, group.method) for group in groups)
    if recipe.seed is not None and not is_random:
        problems.add(("seed",), "has no effect without score 'random'; leave it out.")


def _check_share(group: GroupForm, path: KeyPath, problems: Problems) -> None:
    """Check limits and a budget, which divide one total among tensors."""
    has_own_shares = group.scope in ("layer", "row")
    same = f"has no effect with scope {group.scope!r}, where every tensor loses the same share;"
    if group.limits is not None and group.limits.has_effect and has_own_shares:
        way_out = "leave it out, or rank all tensors together (scope 'global')."
        problems.add((*path, "limits"), f"{same} {way_out}")
    if group.budget is not None and has_own_shares:
        problems.add((*path, "budget"), f"{same} leave one of them out.")
    elif group.budget == "lamp" and "random" in (group.score, group.method):
        text = "'lamp' divides by the squares of magnitudes; expected another score than 'random'."
        problems.add((*path, "budget"), text)


def _check_normalize(group: GroupForm, path: KeyPath, problems: Problems) -> None:
    if group.normalize in (None, "none") or group.is_normalizable:
        return
    if group.pattern is not None and not group.is_n_of_m:
        beside = "beside a pattern of tiles, whose scores are sums of raw magnitudes"
    elif group.pattern is not None:
        beside = "beside a pattern, which compares weights of one tensor"
    elif group.budget is not None:
        beside = "beside a budget, with which weights of one tensor are compared"
    elif group.scope in ("layer", "row"):
        beside = f"with scope {group.scope!r}, which compares weights of one tensor"
    else:
        beside = "with score 'random', which does not depend on the weights"
    problems.add((*path, "normalize"), f"has no effect {beside}; leave it out.")
