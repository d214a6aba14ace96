"""Local steps of a call: what came of them, which errors all ranks know, and interrupts that wait.

See collectives.[Note: all or none]. Nobody tells the others of an error that all ranks of a call
have raised. It may be raised again, later, and the others do not know of that: so the mark of such
an error counts from a moment on.

Two threads that talk over one process group at a time would mix their messages, and gloo ends the
process then: a group takes one call at a time. An interrupt (Ctrl-C) between two collectives would
leave the other ranks alone, so it waits for the end of the local step that it meets.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

# Process groups (by id) that a call of this process is using, and the thread of that call.
_in_use: dict[int, int] = {}
_lock = threading.Lock()
# Has an element while an interrupt waits. Only the main thread gets interrupts.
_waiting: list[None] = []


@contextlib.contextmanager
def exclusively(groups: Sequence[Any]) -> Iterator[None]:
    """Keep other calls off these process groups until this one is over.

    An interrupt waits meanwhile for :func:`raise_waiting_interrupt`, or for the end of the call; a
    second one is raised at once.

    Args:
        groups: of the call; none of a call that does not communicate.

    Raises:
        RuntimeError: another call is under way on one of these groups.
    """
    keys = [id(group) for group in groups]
    with _lock:
        holder = next((_in_use[key] for key in keys if key in _in_use), None)
        if holder is None:
            _in_use.update(dict.fromkeys(keys, threading.get_ident()))
    if holder is not None:
        raise RuntimeError(_refusal(is_own=holder == threading.get_ident()))
    try:
        with interrupts_wait() if groups else contextlib.nullcontext():
            yield
    finally:
        with _lock:
            for key in keys:
                del _in_use[key]


def raise_waiting_interrupt() -> None:
    """Raise KeyboardInterrupt if one has been waiting; in the main thread."""
    if _waiting and threading.current_thread() is threading.main_thread():
        _waiting.clear()
        raise KeyboardInterrupt


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let an interrupt wait for the end of a block; a second one is raised at once."""
    present = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(present):
        yield
        return

    def wait(number: int, frame: Any) -> None:
        if _waiting:
            present(number, frame)
        _waiting.append(None)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
        raise_waiting_interrupt()
    finally:
        signal.signal(signal.SIGINT, present)
        _waiting.clear()


def _refusal(*, is_own: bool) -> str:
    thread, way_out = (
        ("this", "Do not call distprune from a function that it calls.")
        if is_own
        else (
            "another",
            "Wait for the other thread, or give each thread a group of its own "
            "(torch.distributed.new_group).",
        )
    )
    return (
        f"a distprune call is under way on this process group, in {thread} thread; expected one "
        f"call at a time. {way_out}"
    )


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
