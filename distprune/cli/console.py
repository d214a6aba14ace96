"""Where commands write: data to stdout; notes, progress and errors to stderr."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from distprune.cli import documents, streams, tables
from distprune.cli.escaping import printable
from distprune.files.text import format_percent


class _Errors(Console):
    """The console on stderr. Rich would end the process, and close stdout, if nobody reads it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Terminal:
    """What one command writes.

    Args:
        as_json: data is one JSON document.
        verbosity: -1 errors only, 0, or more with every ``-v``.
        is_leader: other ranks write errors only.

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
            streams.write_document(documents.dump(value) + "\n")

    def text(self, text: str = "") -> None:
        """A line of data, with escape sequences in place of what is not visible."""
        if self.is_leader:
            streams.write(printable(text) + "\n")

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()
    ) -> None:
        """Rows of plain text below headings; in a file, each row is a line.

        On a terminal, long names are folded, at dots and underscores, if a row is too wide.

        Args:
            columns: the headings.
            rows: as many texts each.
            right: the columns of numbers, which are never folded.
        """
        if not self.is_leader:
            return
        is_terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if is_terminal else None
        lines = tables.layout(columns, rows, right=right, width=width)
        first = next(lines)
        is_bold = is_terminal and os.environ.get("TERM") not in (None, "dumb", "unknown")
        heading = f"\x1b[1m{first}\x1b[0m" if is_bold else first
        streams.write("\n".join([heading, *lines, ""]))

    def note(self, text: str) -> None:
        """Something to know, unless ``-q``."""
        if self.verbosity >= 0:
            self._print(text)

    def detail(self, text: str) -> None:
        """Something to know with ``-v``."""
        if self.verbosity >= 1:
            self._print(text, style="dim")

    def _print(self, text: str, style: str | None = None) -> None:
        # Work goes on when nobody reads what it says. As Text: rich looks for :emoji: in a str.
        try:
            self.errors.print(Text(printable(text)), style=style)
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


def duration(seconds: float) -> str:
    """7 s, 12 min, 3.5 h: of estimates."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
