"""One call at a time on a process group, and no interrupt in the middle of one.

Two threads that talk over one group at a time would mix their messages, and gloo ends the process
then. An interrupt (Ctrl-C) between two collectives would leave the other ranks alone, so it waits
for the end of the local step that it meets; see collectives.[Note: all or none].
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

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
