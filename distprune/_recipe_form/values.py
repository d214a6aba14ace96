"""Values of a recipe that are more than a number or a text; without pydantic."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Literal

from distprune._common.n_of_m import checked_pattern as checked_pattern
from distprune._common.n_of_m import n_of_m as n_of_m
from distprune._common.n_of_m import tile_of as tile_of
from distprune._common.patterns import check_pattern

# What the magnitudes of a tensor are divided by.
Statistic = Literal["rms", "l2", "mean"]
# Scores that are made of weights and of statistics of activations.
FROM_STATISTICS = ("wanda", "stade")


def listed(values: Sequence[object]) -> str:
    """ "'a', 'b' or 'c'"."""
    *rest, last = map(repr, values)
    return f"{', '.join(rest)} or {last}" if rest else last


def choice_text(choices: Sequence[str | int], value: object) -> str:
    """The choices, with the one that is close to a value."""
    close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    return listed(choices) + (f" (did you mean {close[0]!r}?)" if close else "")


def compile_pattern(pattern: str) -> None:
    """Check a regular expression after "re:"; globs are always right.

    Raises:
        ValueError: with what was expected.
    """
    try:
        check_pattern(pattern)
    except ValueError as error:
        raise ValueError(f"a regular expression after 're:' ({error})") from error


def input_dims_pairs(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Dimensions by pattern, {"*.c_fc.weight": 0}, as pairs; a dimension alone or a list of them.

    Raises:
        ValueError: with what was expected.
    """
    expected = "dimensions by pattern, such as {'*.c_fc.weight': 0}"
    try:
        dims_of = dict(value)  # also of pairs
    except (TypeError, ValueError):
        raise ValueError(expected) from None
    pairs = []
    for pattern, dims in dims_of.items():
        dims = dims if isinstance(dims, list | tuple) else [dims]
        if not isinstance(pattern, str) or not pattern or not dims or not all(map(_is_int, dims)):
            raise ValueError(expected)
        compile_pattern(pattern)
        pairs.append((pattern, tuple(dims)))
    return tuple(pairs)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
