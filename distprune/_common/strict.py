"""Read nested settings strictly: every unknown key and wrong value is found, all at once.

A :class:`Table` is a mapping that is read key by key; what is wrong goes to a list of problems
that the whole document shares, each with the key's path and, for a file, its line.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

KeyPath = tuple[str | int, ...]
Lines = Mapping[KeyPath, int]
# Returns the value as it is to be used, or raises ValueError with what was expected.
Check = Callable[[Any], Any]

MISSING = object()
# More than any recipe needs.
_MAX_BYTES = 1_000_000
_MAX_DEPTH = 16


class Problems(list[tuple[int, str]]):
    """What is wrong with a document, as (line, text); line 0 where there are no lines."""

    def __init__(self, lines: Lines | None = None) -> None:
        super().__init__()
        self._lines = {} if lines is None else lines  # read when a problem is added

    def add(self, path: KeyPath, text: str) -> None:
        line = self._lines.get(path, 0)
        where = f"line {line}, " if line else ""
        name = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
        self.append((line, f"{where}{name.lstrip('.') or 'the document'}: {text}"))

    def texts(self) -> list[str]:
        """In the order of the file."""
        return [text for _, text in sorted(self, key=lambda problem: problem[0])]


class Table:
    """A mapping that knows its place in the document and which keys it may have."""

    def __init__(self, value: Any, path: KeyPath, known: tuple[str, ...], problems: Problems):
        self.path = path
        self.problems = problems
        self._values: Mapping[str, Any] = {}
        self.is_mapping = isinstance(value, Mapping)
        if not self.is_mapping:
            self.problem(f"expected a mapping with {_listed(known)}, found {shown(value)}.")
            return
        self._values = value
        for key in value:
            if key not in known:
                self._unknown(key, known)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def peek(self, *keys: str) -> Any:
        """A value further in, unchecked; None if it is not there."""
        value: Any = self._values
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def problem(self, text: str, *keys: str | int) -> None:
        self.problems.add((*self.path, *keys), text)

    def take(self, key: str, check: Check, default: Any = MISSING) -> Any:
        """A checked value; the default, or None, if it is missing or wrong."""
        if key not in self._values:
            if default is MISSING and self.is_mapping:
                self.problem(f"has no {key!r}, which is needed.")
            return None if default is MISSING else default
        value = self._values[key]
        try:
            return check(value)
        except ValueError as error:
            self.problem(f"expected {error}, found {shown(value)}.", key)
            return None if default is MISSING else default

    def table(self, key: str, known: tuple[str, ...]) -> Table:
        """A mapping inside this one; empty if it is missing."""
        return Table(self._values.get(key, {}), (*self.path, key), known, self.problems)

    def tables(self, key: str, known: tuple[str, ...]) -> list[Table]:
        """A list of mappings inside this one."""
        values = self._values.get(key, [])
        if not isinstance(values, list) or not values:
            self.problem(f"expected a list of mappings, found {shown(values)}.", key)
            return []
        return [Table(v, (*self.path, key, i), known, self.problems) for i, v in enumerate(values)]

    def _unknown(self, key: Any, known: tuple[str, ...]) -> None:
        close = difflib.get_close_matches(str(key), known, n=1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        self.problem(f"unknown key.{meant} Expected {_listed(known)}.", key)


def one_of(*choices: str | int) -> Check:
    """One of a few values."""

    def check(value: Any) -> Any:
        if isinstance(value, bool) or value not in choices:
            close = difflib.get_close_matches(str(value), [str(c) for c in choices], n=1)
            raise ValueError(_listed(choices) + (f" (did you mean {close[0]!r}?)" if close else ""))
        return value

    return check


def whole_number(lowest: int) -> Check:
    """An int >= lowest."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise ValueError(f"a whole number >= {lowest}")
        return value

    return check


def share(value: Any) -> float:
    """A number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError("a number from 0 to 1" + _hint(value))
    return float(value)


def flag(value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def texts(value: Any) -> tuple[str, ...]:
    """A string, or a list of strings, none of them empty."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not values:
        raise ValueError("a string or a list of strings")
    if not all(isinstance(each, str) and each for each in values):
        raise ValueError("strings that are not empty")
    return tuple(values)


def shown(value: Any) -> str:
    """A value and its type, for a message; shortened if it is long."""
    text = repr(value)
    return f"{text if len(text) < 80 else text[:76] + ' ...'} ({type(value).__name__})"


def read_yaml(path: Path) -> tuple[Any, Problems]:
    """A YAML file as plain values, with the line of each key; keys given twice are problems.

    Aliases are refused: they let a small file stand for any amount of data. So are large files,
    and values inside of many others.

    Raises:
        ImportError: PyYAML is missing.
        ValueError: no YAML, or more than a recipe can need; names the file.
        OSError: the file cannot be read.

    Cost: some seconds for the largest file that is read, one of a megabyte.
    """
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            f"{path}: reading YAML needs PyYAML: pip install 'distprune[recipes]'. "
            "parse_recipe(mapping) does not."
        ) from error
    loader = None
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
    """Make a loader refuse aliases and deep nesting as soon as it meets them."""
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


def _build(loader: Any, node: Any, path: KeyPath, lines: dict, problems: Problems) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if node.id == "sequence":
        return [
            _build(loader, each, (*path, i), lines, problems) for i, each in enumerate(node.value)
        ]
    if node.id == "scalar":
        try:
            return loader.construct_object(node)
        except (ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # Dates that are none, numbers that are too long, tags that do not fit.
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


def _listed(choices: tuple[str | int, ...]) -> str:
    *rest, last = map(repr, choices)
    return f"{', '.join(rest)} or {last}" if rest else last


def _hint(value: Any) -> str:
    """YAML takes 1e-3 for text."""
    try:
        return f"; write it as {float(value)!r}" if isinstance(value, str) else ""
    except ValueError:
        return ""
