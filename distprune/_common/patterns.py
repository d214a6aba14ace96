"""Names of parameters: patterns for them, and the order in which "layers.2" is before "layers.10".

A pattern is a glob (``*``, ``?``, ``[...]``; ``*`` crosses dots) or, after ``re:``, a regular
expression. It matches a parameter if it matches its whole name ("layers.0.mlp.weight") or that of
its module ("layers.0.mlp"). Case matters. Live models and files have this one rule.

[Note: patterns without end] Python's regular expressions backtrack: some, such as ``(a+)+``, take
years on a name that they nearly match. A recipe from elsewhere may have one, by mistake or to do
harm. The engine looks for signals while it searches, so a timer of the process's own time ends such
a search; in other threads than the main one there is no such limit.
"""

from __future__ import annotations

import functools
import re
import signal
import threading
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import NoReturn

_REGEX = "re:"
_SECONDS = 2.0  # of the processor, for one name; a search that ends takes microseconds


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a pattern matches the full name of a parameter, as a function of the name.

    The function raises ValueError, with the pattern and the name, if the search does not end; see
    [Note: patterns without end].

    Raises:
        re.error: no regular expression after ``re:``.
    """
    if pattern.startswith(_REGEX):
        is_match = re.compile(pattern.removeprefix(_REGEX)).fullmatch
        return _with_time_limit(
            pattern, lambda name: bool(is_match(name) or is_match(_module_of(name)))
        )
    return lambda name: fnmatchcase(name, pattern) or fnmatchcase(_module_of(name), pattern)


def _with_time_limit(pattern: str, is_match: Callable[[str], bool]) -> Callable[[str], bool]:
    """The same function, which raises ValueError after ``_SECONDS``; see the note above."""

    def stop(*_: object) -> NoReturn:
        raise TimeoutError

    def limited(name: str) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return is_match(name)
        handler = signal.signal(signal.SIGVTALRM, stop)
        timer = signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
        try:
            return is_match(name)
        except TimeoutError:
            raise ValueError(
                f"{pattern!r} takes more than {_SECONDS:g} s of the processor on the name "
                f"{name!r}; expected an expression without repetitions of what is repeated, such "
                "as '(a+)+'."
            ) from None
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, *timer)  # that of the caller, if there is one
            signal.signal(signal.SIGVTALRM, handler or signal.SIG_DFL)

    return limited


def check_pattern(pattern: str) -> None:
    """Raise ValueError, with the reason, for what is no regular expression after ``re:``."""
    try:
        matcher(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from error


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


SortKey = list[tuple[int, int, str]]


def natural_key(name: str) -> SortKey:
    """A key to sort names by: numbers in them compare as numbers."""
    return [_part_key(part) for part in _PARTS.findall(name)]


@functools.lru_cache(maxsize=1 << 16)
def _part_key(part: str) -> tuple[int, int, str]:
    """The key of a run of digits or of other characters; names consist of few different runs."""
    if not "0" <= part[0] <= "9":
        return (1, 0, part)
    number = part.lstrip("0")
    return (0, len(number), number)  # a longer number without leading zeros is a larger one


_PARTS = re.compile(r"[0-9]+|[^0-9]+")
