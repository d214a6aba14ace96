"""Where commands write: data to stdout; notes, progress and errors to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDE = 1000  # columns of a table that goes to a file: nothing is cut off


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
        self._data = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)
        self.errors = Console(stderr=True, highlight=False, soft_wrap=True)

    def json(self, value: Any) -> None:
        """One JSON document."""
        if self.is_leader:
            print(json.dumps(value, indent=2), flush=True)

    def text(self, text: str = "") -> None:
        """A line of data, as it is."""
        if self.is_leader:
            self._data.print(text, markup=False, soft_wrap=True)

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()
    ) -> None:
        """Rows of plain text below headings.

        Args:
            columns: the headings.
            rows: as many texts each.
            right: the columns of numbers.
        """
        if not self.is_leader:
            return
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for column in columns:
            table.add_column(
                column,
                justify="right" if column in right else "left",
                no_wrap=column in right,
                overflow="fold",
            )
        for row in rows:
            # As Text: names have brackets in them, which are no markup.
            table.add_row(*(Text(cell) for cell in row))
        with self._data.capture() as captured:
            self._data.print(table)
        for line in captured.get().splitlines():
            print(line.rstrip())

    def note(self, text: str) -> None:
        """Something to know, unless ``-q``."""
        if self.verbosity >= 0:
            self.errors.print(text, markup=False)

    def detail(self, text: str) -> None:
        """Something to know with ``-v``."""
        if self.verbosity >= 1:
            self.errors.print(text, markup=False, style="dim")


def count(value: int) -> str:
    """1,234,567."""
    return f"{value:,}"


def counted(value: int, what: str) -> str:
    """ "1 tensor", "2 tensors"."""
    return f"{value:,} {what}" if value == 1 else f"{value:,} {what}s"


def percent(part: int, whole: int) -> str:
    """Two digits after the point; never 100.00 or 0.00 where it is not exactly that."""
    if not whole:
        return "-"
    share = 100 * part / whole
    if 0 < part < whole:
        share = min(max(share, 0.01), 99.99)
    return f"{share:.2f} %"


def size(num_bytes: float) -> str:
    """1.5 GB; decimal units, as disks have them."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
