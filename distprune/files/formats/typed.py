"""JSON that somebody may have changed, as the dataclasses that it was made from."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

_NOUNS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def from_json(kind: Any, value: Any, where: str, **more: Any) -> Any:
    """A value of an annotated type, from JSON.

    Args:
        kind: a dataclass, or what its fields are annotated with: plain values, lists, tuples, dicts
            with strings as keys, unions of these, other dataclasses, and Any. A field that has a
            default may be missing.
        value: as ``json.loads`` returns it.
        where: what to call the value in messages.
        more: fields of a dataclass that the JSON does not hold.

    Raises:
        ValueError: the value is of another type; says where, what was found and expected.
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
        return {key: from_json(arguments[1], each, f"{where}[{_short(key)}]")
                for key, each in value.items()}  # fmt: skip
    if origin in (list, tuple):
        return _sequence(origin, arguments, value, where)
    # A bool is an int to Python, and a whole number may stand for a float, but to no report.
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
    needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    missing, unknown = needed - set(value), set(value) - set(fields)
    if missing:
        raise ValueError(f"{where or 'it'} lacks {_short(min(missing))}")
    if unknown:
        raise ValueError(f"{where or 'it'} has an unknown {_short(min(unknown))}")
    found = dict(more)
    for name in fields.keys() & value.keys():
        found[name] = from_json(hints[name], value[name], f"{where}.{name}".removeprefix("."))
    return kind(**found)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Of a dataclass; to find them takes longer than to read one of the 100,000 tensors."""
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
        from_json(kind, each, f"{where}[{place}]")
        for place, (kind, each) in enumerate(zip(kinds, value, strict=True))
    )


def _plain(is_good: bool, value: Any, where: str, noun: str) -> Any:
    if not is_good:
        raise ValueError(f"{where or 'it'} is {_short(value)}; expected {noun}")
    return value


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
