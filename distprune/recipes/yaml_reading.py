"""Read YAML with the line of each key; refuse files that no recipe can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distprune.recipes.problems import KeyPath, Problems

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
