"""Untrusted JSON as dataclasses: each value is checked against its annotation."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

_NOUNS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def from_json(kind: Any, value: Any, where: str, **more: Any) -> Any:
    """Check a JSON value against an annotated type, and convert it.

    Args:
        kind: a dataclass or a type of its fields: plain values, lists, tuples, dicts with strings
            as keys, unions of these, other dataclasses, and Any. A field with a default may be
            missing.
        value: from ``json.loads``.
        where: path of the value, for messages.
        more: fields of a dataclass that are not in the JSON.

    Returns:
        The value, as an instance of the type.

    Raises:
        ValueError: the value is of another type; names its path, the value and the expected type.
    """
    if kind is Any:
        return value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _union(arguments, value, where)
    if kind is type(None):
        return _plain(value is None, value, where, "null")
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where, more)
    if origin is dict:
        _plain(isinstance(value, dict), value, where, "an object")
        return {key: from_json(arguments[1], inner, f"{where}[{_short(key)}]")
                for key, inner in value.items()}  # fmt: skip
    if origin in (list, tuple):
        return _sequence(origin, arguments, value, where)
    # Exact types: no bool for an int, and no int for a float.
    return _plain(type(value) is kind, value, where, _NOUNS[kind])


def _union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    for kind in kinds[:-1]:
        if kind is not type(None):
            try:
                return from_json(kind, value, where)
            except ValueError:
                if len(kinds) == 2:
                    raise
    return from_json(kinds[-1], value, where)


def _dataclass(kind: Any, value: Any, where: str, more: dict[str, Any]) -> Any:
    _plain(isinstance(value, dict), value, where, "an object")
    hints = _hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.name not in more}
    required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    missing, unknown = required - set(value), set(value) - set(fields)
    if missing:
        raise ValueError(f"{where or 'it'} lacks {_short(min(missing))}")
    if unknown:
        raise ValueError(f"{where or 'it'} has an unknown {_short(min(unknown))}")
    arguments = dict(more)
    for name in fields.keys() & value.keys():
        arguments[name] = from_json(hints[name], value[name], f"{where}.{name}".removeprefix("."))
    return kind(**arguments)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Annotations of a dataclass; cached, since a report has up to 100,000 tensors."""
    return get_type_hints(kind)


def _sequence(origin: Any, arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    _plain(isinstance(value, list), value, where, "a list")
    if origin is tuple and arguments[-1] is not Ellipsis:
        noun = f"a list of {len(arguments)}"
        _plain(len(value) == len(arguments), value, where, noun)
        kinds = arguments
    else:
        kinds = (arguments[0],) * len(value)
    return origin(
        from_json(kind, item, f"{where}[{index}]")
        for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _plain(is_good: bool, value: Any, where: str, noun: str) -> Any:
    if not is_good:
        raise ValueError(f"{where or 'it'} is {_short(value)}; expected {noun}")
    return value


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
