"""Values of a recipe that are more than a number or a text; without pydantic."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any, Literal

from distprune._common.patterns import check_pattern

# What the magnitudes of a tensor are divided by.
Statistic = Literal["rms", "l2", "mean"]


def listed(values: Sequence[object]) -> str:
    """ "'a', 'b' or 'c'"."""
    *rest, last = map(repr, values)
    return f"{', '.join(rest)} or {last}" if rest else last


def choice_text(choices: Sequence[str | int], value: object) -> str:
    """The choices, with the one that is close to a value."""
    close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    return listed(choices) + (f" (did you mean {close[0]!r}?)" if close else "")


def n_of_m(value: Any) -> tuple[int, int]:
    """ "2:4" as (2, 4).

    Raises:
        ValueError: with what was expected.
    """
    match = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", value) if isinstance(value, str) else None
    n, m = map(int, match.groups()) if match else (0, 0)
    if not 0 < n < m:
        # Without quotes, YAML may read it as a number to the base of 60.
        raise ValueError('how many of how many are kept, such as "2:4", in quotes')
    return n, m


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
