"""The outcome of a local step that may fail on one rank: see collectives.[Note: all or none]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from distprune._common.exclusive import raise_waiting_interrupt

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Failed:
    """The outcome of a local step that raised."""

    error: BaseException


def attempt(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Failed:
    """Call, and return the result, or what was raised.

    Interrupts and exits are raised at once; see :func:`attempt_all`.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:  # of any type: every rank is to raise it
        return Failed(error)


def attempt_all(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Failed:
    """The same, and interrupts and exits are errors too: what ends this rank ends the call.

    So is an interrupt that waits; see :meth:`Communicator.exclusively`.
    """
    try:
        result = function(*args, **kwargs)
        raise_waiting_interrupt()
    except BaseException as error:
        return Failed(error)
    return result


def error_of(outcome: object) -> BaseException | None:
    """What an attempt raised; None if it returned."""
    return outcome.error if isinstance(outcome, Failed) else None
