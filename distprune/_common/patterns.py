"""Patterns for names of parameters: the one rule of live models and files.

A pattern is a glob (``*``, ``?``, ``[...]``; ``*`` crosses dots) or, after ``re:``, a regular
expression. It matches a parameter if it matches its whole name ("layers.0.mlp.weight") or that of
its module ("layers.0.mlp"). Case matters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase

_REGEX = "re:"


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a pattern matches the full name of a parameter, as a function of the name.

    Raises:
        re.error: no regular expression after ``re:``.
    """
    if pattern.startswith(_REGEX):
        is_match = re.compile(pattern.removeprefix(_REGEX)).fullmatch
        return lambda name: bool(is_match(name) or is_match(_module_of(name)))
    return lambda name: fnmatchcase(name, pattern) or fnmatchcase(_module_of(name), pattern)


def check_pattern(pattern: str) -> None:
    """Raise ValueError, with the reason, for what is no regular expression after ``re:``."""
    try:
        matcher(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from error


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]
