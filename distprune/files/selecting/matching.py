"""Patterns for names of tensors: globs, or regular expressions after ``re:``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

_COMPARED = 2000  # names, for a hint: comparing takes some 10 microseconds each


def matched(
    field: str, patterns: Sequence[str], names: Sequence[str], problems: list[str]
) -> set[str]:
    """Names that match one of the patterns, by themselves or by their module's name.

    As in the library's ``select``.

    Args:
        field: of the recipe, for messages.
        patterns: globs or expressions.
        names: of all tensors.
        problems: gets a sentence for each pattern that matches nothing.
    """
    found: set[str] = set()
    for pattern in patterns:
        matches = _matcher(pattern)
        matching = [name for name in names if matches(name) or matches(name.rpartition(".")[0])]
        if not matching:
            close = difflib.get_close_matches(pattern, names[:_COMPARED], n=1, cutoff=0.3)
            example = (close or [*names[:1], "(none)"])[0]
            problems.append(
                f"{field}: {pattern!r} matches none of the {len(names)} tensors; a pattern has to "
                f"match the whole name of a tensor, such as {example}, or of its module."
            )
        found.update(matching)
    return found


def _matcher(pattern: str) -> Callable[[str], Any]:
    if pattern.startswith("re:"):
        return re.compile(pattern[3:]).fullmatch
    return lambda name: fnmatchcase(name, pattern)
