"""How far a command is: a bar on a terminal, else a line every ten seconds, on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from distprune.cli.console import Terminal
from distprune.files.text import format_size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_EVERY = 10.0  # seconds between lines


class State(Protocol):
    """What distprune.files.team.Progress says."""

    @property
    def phase(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def bytes_per_second(self) -> float: ...

    @property
    def seconds_left(self) -> float | None: ...


class WindowsState(Protocol):
    """What distprune.language_models.RunProgress says."""

    @property
    def phase(self) -> str: ...

    @property
    def num_windows(self) -> int: ...

    @property
    def total_windows(self) -> int: ...

    @property
    def windows_per_second(self) -> float: ...

    @property
    def seconds_left(self) -> float | None: ...


class Meter:
    """Shows the progress of all ranks together; use it in a ``with`` statement."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._is_on = terminal.verbosity >= 0
        self._said_at = time.monotonic()
        self._bar: Progress | None = None
        if self._is_on and terminal.errors.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn  # slow; bars are rare

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                console=terminal.errors,
                transient=True,
            )
        self._task: TaskID | None = None

    def __enter__(self) -> Meter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, state: State) -> None:
        self._show(state.phase, state.num_bytes, state.total_bytes, lambda: describe(state))

    def windows(self, state: WindowsState) -> None:
        """Show a run over windows of text."""
        describe = partial(describe_windows, state)
        self._show(state.phase, state.num_windows, state.total_windows, describe)

    def _show(self, phase: str, done: int, total: int, describe: Callable[[], str]) -> None:
        if not self._is_on:
            return
        if self._bar is None:
            if time.monotonic() - self._said_at >= _EVERY:
                self._said_at = time.monotonic()
                self._terminal.note(f"{phase}: {describe()}")
            return
        if self._task is None:
            self._task = self._bar.add_task(phase, text="")
        self._bar.update(
            self._task, description=phase, total=max(total, 1), completed=done, text=describe()
        )


class Reading:
    """The progress of one process; call it with the bytes of every piece."""

    def __init__(self, meter: Meter, total_bytes: int, phase: str = "read") -> None:
        self.phase = phase
        self.num_bytes = 0
        self.total_bytes = total_bytes
        self._meter = meter
        self._began = time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._meter(self)

    @property
    def bytes_per_second(self) -> float:
        seconds = time.monotonic() - self._began
        return self.num_bytes / seconds if seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        rate = self.bytes_per_second
        return (self.total_bytes - self.num_bytes) / rate if rate else None


def describe(state: State) -> str:
    """ "1.2 GB of 3.0 GB, 800.0 MB/s, 0:02 left"."""
    text = f"{format_size(state.num_bytes)} of {format_size(state.total_bytes)}"
    left = state.seconds_left
    if left is None:
        return text
    return f"{text}, {format_size(state.bytes_per_second)}/s, {_clock(left)} left"


def describe_windows(state: WindowsState) -> str:
    """ "12 of 128 windows, 3.1/s, 0:37 left"."""
    text = f"{state.num_windows:,} of {state.total_windows:,} windows"
    left = state.seconds_left
    return (
        text if left is None else f"{text}, {state.windows_per_second:.3g}/s, {_clock(left)} left"
    )


def _clock(left: float) -> str:
    minutes, seconds = divmod(round(max(left, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
