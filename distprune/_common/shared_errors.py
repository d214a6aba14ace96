"""Errors that all ranks of a call have raised: nobody tells the others of them again.

An error may be raised again, later, and the others do not know of that: so a mark counts from a
moment on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TypeVar

E = TypeVar("E", bound=BaseException)

_KEY = "_distprune_shared"
_moments = itertools.count()


def moment() -> int:
    """The present moment: marks that are made later are larger."""
    return next(_moments)


def mark_shared(error: E, ranks: Iterable[int]) -> E:
    """Note on an error that all of these ranks raise it, or have lost each other; returns it."""
    error.__dict__[_KEY] = (moment(), frozenset(ranks))
    return error


def is_shared(error: BaseException, ranks: Iterable[int], since: int) -> bool:
    """Whether all of these ranks know an error, since a moment."""
    mark: tuple[int, frozenset[int]] = error.__dict__.get(_KEY, (-1, frozenset()))
    return mark[0] > since and mark[1].issuperset(ranks)
