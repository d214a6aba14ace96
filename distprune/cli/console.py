"""Where commands write: data to stdout; notes, progress and errors to stderr."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from distprune.files.text import format_percent, format_size, printable

if TYPE_CHECKING:  # torch comes with it
    from distprune.files import team
    from distprune.language_models import RunProgress


def is_leader() -> bool:
    """Whether this process is rank 0 or the only one; it alone writes what concerns all ranks."""
    return os.environ.get("RANK", "0") == "0"


class _Errors(Console):
    """Work goes on when nobody reads what it says; rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Terminal:
    """What one command writes, on rank 0.

    Args:
        as_json: whether data is one JSON document.
        quiet: whether notes and progress are left out.
    """

    def __init__(self, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.is_leader = is_leader()
        self.is_quiet = quiet or not self.is_leader
        self.errors = _Errors(stderr=True, highlight=False, markup=False, emoji=False)

    def json(self, value: Any) -> None:
        """The JSON document of the command."""
        if self.is_leader:
            print(json.dumps(value, indent=2))

    def text(self, text: str = "") -> None:
        """A line of data, with escape sequences in place of what is not visible."""
        if self.is_leader:
            print(printable(text))

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()
    ) -> None:
        """Rows below headings, in one line each: programs read them, and names are long.

        Args:
            columns: the headings.
            rows: their cells; escape sequences replace what is not visible.
            right: headings of columns that are aligned to the right.
        """
        lines = [columns, *([printable(cell) for cell in row] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines if self.is_leader else ():
            cells = zip(columns, line, widths, strict=True)
            texts = (c.rjust(w) if heading in right else c.ljust(w) for heading, c, w in cells)
            print("  ".join(texts).rstrip())

    def note(self, text: str) -> None:
        """Something to know, unless ``--quiet``."""
        if not self.is_quiet:
            self.errors.print(printable(text), soft_wrap=True)


class Meter:
    """Shows the progress of all ranks: a bar on a terminal, else a line every ten seconds."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._written_at = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=terminal.errors,
            transient=True,
            disable=terminal.is_quiet or not terminal.errors.is_terminal,
        )
        self._task = self._bar.add_task("", text="")

    def __enter__(self) -> Meter:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def files(self, state: team.Progress) -> None:
        """Show a run over files."""
        text = f"{format_size(state.num_bytes)} of {format_size(state.total_bytes)}"
        self._show(state.phase, state.num_bytes, state.total_bytes, text)

    def windows(self, state: RunProgress) -> None:
        """Show a run over windows of text."""
        text = f"{state.num_done:,} of {state.total:,} {state.unit}"
        self._show(state.phase, state.num_done, state.total, text)

    def reading(self, total_bytes: int) -> Callable[[int], None]:
        """A function that is called with the number of bytes of each piece that was read."""
        done = 0

        def read(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            text = f"{format_size(done)} of {format_size(total_bytes)}"
            self._show("read", done, total_bytes, text)

        return read

    def _show(self, phase: str, done: int, total: int, text: str) -> None:
        self._bar.update(
            self._task, description=phase, total=max(total, 1), completed=done, text=text
        )
        if self._bar.disable and time.monotonic() - self._written_at >= 10:
            self._written_at = time.monotonic()
            self._terminal.note(f"{phase}: {text}")


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def without_numbers(name: str) -> str:
    """A name with ``*`` for every part that is a number: "layers.*.mlp.weight"."""
    return _NUMBER.sub("*", name)


def shape_text(shape: Sequence[int]) -> str:
    """ "4096 x 1024"; "scalar" for no dimensions."""
    return " x ".join(map(str, shape)) or "scalar"


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
    return f"{part:,} of {whole:,} elements ({percent(part, whole)})"


def time_text(seconds: float, num_ranks: int) -> str:
    """ "3.2 s on 2 processes": of a run."""
    return f"{seconds:.1f} s on {num_ranks} {'process' if num_ranks == 1 else 'processes'}"
