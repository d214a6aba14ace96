"""Recipes: what they may say, how they are read and checked, and the value that they become.

Nothing imports ``form`` before a recipe is checked: pydantic is an optional dependency, and takes a
tenth of a second to import.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

Score = Literal[
    "magnitude",
    "random",
    "wanda",
    "stade",
    "ria",
    "fisher",
    "taylor",
    "elementwise_fisher",
    "given",
]
Budget = Literal["uniform", "erk", "owl"]
# Scores that are made of weights and of statistics: of activations, and of gradients.
FROM_ACTIVATIONS = ("wanda", "stade", "ria")
FROM_STATISTICS = (*FROM_ACTIVATIONS, "fisher")
# Scores of which files hold one for each weight; all but the last are made of gradients.
ELEMENTWISE = ("taylor", "elementwise_fisher")
FROM_FILES = (*ELEMENTWISE, "given")
FROM_GRADIENTS = ("fisher", *ELEMENTWISE)
# The budget that is made of statistics of activations.
BUDGET_FROM_STATISTICS = "owl"


def is_normalizable(scope: object, pattern: object, budget: object, score: object) -> bool:
    """Whether the order of the weights depends on what each tensor is divided by."""
    is_one_ranking = scope in (None, "global") and pattern is None and budget is None
    return is_one_ranking and score != "random"


def default_normalization(score: object) -> str:
    """What scores that are normalizable are divided by; those of gradients compare as they are."""
    return "none" if score in FROM_GRADIENTS else "rms"


KeyPath = tuple[str | int, ...]


class RecipeError(ValueError):
    """A recipe is wrong.

    Attributes:
        problems: a text for every problem; all of them are in the message too.
    """

    def __init__(self, where: str, problems: list[str]) -> None:
        self.problems = tuple(problems)
        count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n  - ".join([f"{where} has {count}:", *problems]))


class Problems(list[str]):
    """What is wrong with a document."""

    def add(self, path: KeyPath, text: str) -> None:
        """Note a problem of the value at a path."""
        name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
        self.append(f"{name.lstrip('.') or 'the document'}: {text}")

    def has(self, path: KeyPath) -> bool:
        """Whether the value at a path has a problem already."""
        name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
        return any(text.startswith(f"{name.lstrip('.')}: ") for text in self)


# More than any recipe needs.
_MAX_BYTES = 1_000_000
_MAX_DEPTH = 16


def read_yaml(path: Path) -> tuple[Any, Problems]:
    """Read a YAML file as plain values; repeated keys are problems.

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
    problems = Problems()
    try:
        loader = yaml.SafeLoader(_read_text(path))
        _refuse_excess(yaml, loader, path)
        node = loader.get_single_node()
        value = None if node is None else _build(loader, node, (), problems)
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


def _build(loader: Any, node: Any, path: KeyPath, problems: Problems) -> Any:
    if node.id == "sequence":
        return [_build(loader, item, (*path, i), problems) for i, item in enumerate(node.value)]
    if node.id == "scalar":
        try:
            return loader.construct_object(node)
        except (ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # Impossible dates, numbers with too many digits, tags that do not fit the value.
            problems.add(path, f"cannot be read ({str(error)[:80]}); expected another value.")
            return None
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if key_node.id != "scalar":
            problems.add(path, "expected texts as keys.")
            continue
        key = key_node.value
        inner = (*path, key)
        if key in values:
            problems.add(inner, "given twice; expected every key once.")
            continue
        values[key] = _build(loader, value_node, inner, problems)
    return values
