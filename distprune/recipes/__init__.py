"""Recipes: what they may say, how they are read and checked, and the value that they become.

Nothing imports ``form`` before a recipe is checked: pydantic is an optional dependency, and takes a
tenth of a second to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from distprune._common.blocks import Pattern

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
Budget = Literal["uniform", "uniform+", "erk", "lamp", "owl"]
# Scores that are made of weights and of statistics: of activations, and of gradients.
FROM_ACTIVATIONS = ("wanda", "stade", "ria")
FROM_STATISTICS = (*FROM_ACTIVATIONS, "fisher")
# Scores of which files hold one for each weight; all but the last are made of gradients.
ELEMENTWISE = ("taylor", "elementwise_fisher")
FROM_FILES = (*ELEMENTWISE, "given")
FROM_GRADIENTS = ("fisher", *ELEMENTWISE)
# The budget that is made of statistics of activations.
BUDGET_FROM_STATISTICS = "owl"


def is_tiled(pattern: object) -> bool:
    """Whether a pattern, which may be wrong, is one of tiles."""
    try:
        return Pattern.parse(pattern).tile is not None
    except ValueError:
        return False


def is_normalizable(scope: object, pattern: object, budget: object, score: object) -> bool:
    """Whether the order of the weights depends on what each tensor is divided by."""
    is_one_ranking = scope in (None, "global") and pattern is None and budget is None
    return is_one_ranking and score != "random"


def default_normalization(score: object) -> str:
    """What scores that are normalizable are divided by; those of gradients compare as they are."""
    return "none" if score in FROM_GRADIENTS else "rms"


KeyPath = tuple[str | int, ...]
Lines = Mapping[KeyPath, int]


class RecipeError(ValueError):
    """A recipe is wrong.

    Attributes:
        problems: a text for every problem; all of them are in the message too.
    """

    def __init__(self, where: str, problems: list[str]) -> None:
        self.problems = tuple(problems)
        count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n  - ".join([f"{where} has {count}:", *problems]))


class Problems(list[tuple[int, str]]):
    """What is wrong with a document, as (line, text); line 0 where there are no lines.

    Args:
        lines: the line of each key, if the document is a file. It may be filled in later.
    """

    def __init__(self, lines: Lines | None = None) -> None:
        super().__init__()
        self._lines = {} if lines is None else lines
        self._paths: set[KeyPath] = set()

    def add(self, path: KeyPath, text: str) -> None:
        """Note a problem of the value at a path."""
        self._paths.add(path)
        line = self._lines.get(path, 0)
        where = f"line {line}, " if line else ""
        name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
        self.append((line, f"{where}{name.lstrip('.') or 'the document'}: {text}"))

    def has(self, path: KeyPath) -> bool:
        """Whether the value at a path has a problem already."""
        return path in self._paths

    def texts(self) -> list[str]:
        """All problems, in the order of the file."""
        return [text for _, text in sorted(self, key=lambda problem: problem[0])]
