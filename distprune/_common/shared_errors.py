"""Errors that all ranks of a call have raised: nobody tells the others of them again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

E = TypeVar("E", bound=BaseException)

_KEY = "_distprune_ranks"


def mark_shared(error: E, ranks: Iterable[int]) -> E:
    """Note on an error that all of these ranks raise it, or have lost each other; returns it."""
    error.__dict__[_KEY] = error.__dict__.get(_KEY, frozenset()).union(ranks)
    return error


def is_shared(error: BaseException, ranks: Iterable[int]) -> bool:
    """Whether all of these ranks know an error."""
    known: frozenset[int] = error.__dict__.get(_KEY, frozenset())
    return known.issuperset(ranks)
