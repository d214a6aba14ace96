"""Where commands write: data to stdout; notes, progress and errors to stderr.

Data is text, tables or one JSON document. All of them are made for checkpoints of 100,000 tensors.
Progress is a bar on a terminal, else a line every ten seconds.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from distprune.cli import process
from distprune.files.text import format_percent, format_size, printable

if TYPE_CHECKING:  # torch comes with it
    from rich import progress

    from distprune.files.team import Progress
    from distprune.language_models import RunProgress


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def without_numbers(name: str) -> str:
    """A name with ``*`` for every part that is a number: "layers.*.mlp.weight"."""
    return _NUMBER.sub("*", name)


def shape_text(shape: Sequence[int]) -> str:
    """ "4096 x 1024"; "scalar" for no dimensions."""
    return " x ".join(map(str, shape)) or "scalar"


def layout(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()
) -> Iterator[str]:
    """The lines of a table, the headings first."""
    lines = [columns, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(columns, line, widths, strict=True)
        texts = (c.rjust(w) if heading in right else c.ljust(w) for heading, c, w in cells)
        yield "  ".join(texts).rstrip()


class _Errors(Console):
    """The console on stderr. Rich would end the process, and close stdout, if nobody reads it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Terminal:
    """What one command writes.

    Attributes:
        errors: the rich console on stderr.
    """

    def __init__(
        self, as_json: bool = False, verbosity: int = 0, *, is_leader: bool = True
    ) -> None:
        self.as_json = as_json
        self.is_leader = is_leader
        self.verbosity = verbosity if is_leader else -1
        self.errors = _Errors(stderr=True, highlight=False, soft_wrap=True)

    def json(self, value: Any) -> None:
        """The JSON document of the command."""
        if self.is_leader:
            process.write_document(json.dumps(value, indent=2))

    def text(self, text: str = "") -> None:
        """A line of data, with escape sequences in place of what is not visible."""
        if self.is_leader:
            print(printable(text))

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()
    ) -> None:
        """Rows of plain text below headings."""
        if self.is_leader:
            print("\n".join(layout(columns, rows, right=right)))

    def note(self, text: str) -> None:
        """Something to know, unless ``-q``."""
        if self.verbosity < 0:
            return
        # Work goes on when nobody reads what it says. As Text: rich looks for :emoji: in a str.
        try:
            self.errors.print(Text(printable(text)))
        except OSError:
            self.errors.quiet = True


def count(value: int) -> str:
    """1,234,567."""
    return f"{value:,}"


def counted(value: int, what: str) -> str:
    """ "1 tensor", "2 tensors"."""
    return f"{value:,} {what}" if value == 1 else f"{value:,} {what}s"


def percent(part: int, whole: int) -> str:
    """ "12.34 %", as :func:`format_percent`; "-" if the whole is 0."""
    return format_percent(part, whole) if whole else "-"


def share_text(part: int, whole: int) -> str:
    """ "1,234 of 5,678 elements (21.73 %)"."""
    return f"{count(part)} of {count(whole)} elements ({percent(part, whole)})"


def time_text(seconds: float, num_ranks: int) -> str:
    """ "3.2 s on 2 processes": of a run."""
    return f"{seconds:.1f} s on {num_ranks} {'process' if num_ranks == 1 else 'processes'}"


_EVERY = 10.0  # seconds between lines


class Meter:
    """Shows the progress of all ranks together; use it in a ``with`` statement."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._is_on = terminal.verbosity >= 0
        self._said_at = time.monotonic()
        self._bar: progress.Progress | None = None
        if self._is_on and terminal.errors.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn  # slow; bars are rare

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                console=terminal.errors,
                transient=True,
            )
        self._task: progress.TaskID | None = None

    def __enter__(self) -> Meter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, state: Progress) -> None:
        self._show(state.phase, state.num_bytes, state.total_bytes, lambda: describe(state))

    def reading(self, total_bytes: int) -> Callable[[int], None]:
        """A function that is called with the number of bytes of each piece that was read."""
        done = 0

        def read(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            text = f"{format_size(done)} of {format_size(total_bytes)}"
            self._show("read", done, total_bytes, lambda: text)

        return read

    def windows(self, state: RunProgress) -> None:
        """Show a run over windows of text."""
        describe = partial(describe_windows, state)
        self._show(state.phase, state.num_done, state.total, describe)

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


def describe(state: Progress) -> str:
    """ "1.2 GB of 3.0 GB"."""
    return f"{format_size(state.num_bytes)} of {format_size(state.total_bytes)}"


def describe_windows(state: RunProgress) -> str:
    """ "12 of 128 windows, 3.1/s, 0:37 left"."""
    text = f"{state.num_done:,} of {state.total:,} {state.unit}"
    left = state.seconds_left
    return text if left is None else f"{text}, {state.per_second:.3g}/s, {_clock(left)} left"


def _clock(left: float) -> str:
    return str(timedelta(seconds=round(max(left, 0))))
