"""Watches the processes that ``--nproc`` starts until all have ended; none can block that."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

from distprune.cli import exits

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_SECONDS = 30.0  # for the other ranks, after a failure of one or a signal
KILL_SECONDS = 5.0  # between SIGTERM and SIGKILL
_POLL_SECONDS = 0.05


class Watch:
    """Starts processes, one for each rank, and waits for all of them.

    A signal is passed on to all of them. After a failure of one, or a signal, the others have
    ``GRACE_SECONDS`` to end; then they get SIGTERM, and ``KILL_SECONDS`` later SIGKILL. A second
    signal kills them at once.

    Args:
        say: called with messages for the user.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._processes: list[subprocess.Popen[bytes]] = []
        self._signals: list[int] = []  # received so far
        self._is_signalled = False
        self._is_terminating = False
        self._deadline: float | None = None
        self._failed: set[int] = set()  # ranks that ended with a failure
        self._killed: set[int] = set()  # ranks that got SIGKILL from this process
        self._causes: list[int] = []  # exit codes of failures that this process did not cause

    def run(self, start: Callable[[int], subprocess.Popen[bytes]], num_ranks: int) -> int:
        """Start all ranks and wait for them.

        Args:
            start: starts the process of a rank.
            num_ranks: how many.

        Returns:
            0 if all ranks return 0; the code of the signal, if one was received before any
            failure; otherwise the code of a rank that failed, or 5 if one was killed.

        Raises:
            OSError: a process cannot be started; those that were started are killed.
        """
        with self._listening():
            try:
                for rank in range(num_ranks):
                    with _signals_blocked():  # inherited; the rank unblocks them when it is ready
                        self._processes.append(start(rank))
                while self._is_running():
                    self._poll()
                    time.sleep(_POLL_SECONDS)
                self._note_failures()
            finally:
                for process in self._processes:
                    process.kill()
                for process in self._processes:
                    process.wait()
        return self._code()

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        def receive(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        previous = {number: signal.signal(number, receive) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _is_running(self) -> bool:
        return any(process.poll() is None for process in self._processes)

    def _poll(self) -> None:
        """Pass on signals, and end processes that have not ended by their deadline."""
        self._note_failures()
        if self._signals and not self._is_signalled:
            self._is_signalled = True
            self._send(self._signals[0])
            self._begin_grace()
        elif len(self._signals) > 1:
            self._kill("a second signal came")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            if self._is_terminating:
                self._kill(f"SIGTERM did not end it in {KILL_SECONDS:.0f} s")
            else:
                self._is_terminating = True
                self._deadline = time.monotonic() + KILL_SECONDS
                self._send(signal.SIGTERM)

    def _note_failures(self) -> None:
        for rank, process in enumerate(self._processes):
            code = process.poll()
            if not code or rank in self._failed:
                continue
            self._failed.add(rank)
            self._begin_grace()
            if self._is_signalled or self._is_terminating or rank in self._killed:
                continue  # this process caused it
            self._causes.append(code)
            if code < 0:
                self._say(
                    f"the process of rank {rank} was ended by {_name(-code)}; if that was SIGKILL, "
                    "the machine may have run out of memory. Run the same command again: it "
                    "continues where this one stopped."
                )

    def _begin_grace(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + GRACE_SECONDS

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)  # does nothing if it has ended

    def _kill(self, why: str) -> None:
        alive = [rank for rank, process in enumerate(self._processes) if process.poll() is None]
        if not set(alive) <= self._killed:
            self._say(f"killing the process of rank {', '.join(map(str, alive))}: {why}.")
        self._killed |= set(alive)
        for rank in alive:
            self._processes[rank].kill()

    def _code(self) -> int:
        if not any(process.returncode for process in self._processes):
            return exits.OK
        if self._causes:
            # Ranks that fail because another one has ended return 5.
            codes = [code for code in self._causes if code != exits.DISTRIBUTED]
            return codes[0] if codes and min(codes) > 0 else exits.DISTRIBUTED
        is_interrupt = self._signals[:1] == [signal.SIGINT]
        return exits.INTERRUPTED if is_interrupt else exits.TERMINATED


def say(text: str) -> None:
    """Write a line to stderr, unless it is closed."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"distprune: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
