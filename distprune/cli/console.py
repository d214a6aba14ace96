"""Where commands write: data to stdout; notes, progress and errors to stderr.

Data is text, tables or one JSON document. All of them are made for checkpoints of 100,000 tensors.
Progress is a bar on a terminal, else a line every ten seconds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from distprune.cli import process
from distprune.cli.process import printable
from distprune.files.text import format_percent, format_size

if TYPE_CHECKING:  # torch comes with it
    from rich import progress

    from distprune.files.team import Progress
    from distprune.language_models import RunProgress


def dump(value: Any) -> str:
    """A value as JSON, in ASCII.

    Objects and lists of objects are spread over lines, two levels deep; what is below is on one
    line. A document of 100,000 tensors takes half a second: with an indent for every level, it
    would take ten times as long.
    """
    return _dump(value, "", 2)


def _dump(value: Any, indent: str, depth: int) -> str:
    inner = indent + "  "
    if depth and isinstance(value, dict) and value:
        lines = [
            f"{inner}{json.dumps(str(key))}: {_dump(item, inner, depth - 1)}"
            for key, item in value.items()
        ]
        return "{\n" + ",\n".join(lines) + "\n" + indent + "}"
    if depth and isinstance(value, (list, tuple)) and any(isinstance(v, dict) for v in value):
        lines = [inner + json.dumps(item) for item in value]
        return "[\n" + ",\n".join(lines) + "\n" + indent + "]"
    return json.dumps(value)


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def without_numbers(name: str) -> str:
    """A name with ``*`` for every part that is a number: "layers.*.mlp.weight"."""
    return _NUMBER.sub("*", name)


def shape_text(shape: Sequence[int]) -> str:
    """ "4096 x 1024"; "scalar" for no dimensions."""
    return " x ".join(map(str, shape)) or "scalar"


_GAPS = ("  ", " ")  # between columns; the second where the first leaves too little
_NARROWEST = 16  # columns of text are not folded to less ...
_NARROWEST_BELOW = 6  # ... but those below a name are
# Where a name may be folded: after these, each piece with what follows it.
_PIECES = re.compile(r"[^._/\s-]*[._/\s-]*")


def layout(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    width: int | None = None,
) -> Iterator[str]:
    """The lines of a table, the headings first.

    Cost: half a second for 100,000 rows of six columns.
    """
    # Each check is done in C, once for all cells of a column.
    texts = [[heading] for heading in columns]
    for column, cells in zip(texts, zip(*rows, strict=True), strict=False):
        column += cells if "".join(cells).isprintable() else map(_one_line, cells)
    is_right = [heading in right for heading in columns]
    natural = [max(map(_measure(column), column)) for column in texts]
    widths, gap = natural, _GAPS[0]
    if width is not None:
        widths, gap = _fit(natural, columns, is_right, width, _NARROWEST)
        if _total(widths, gap) > width and len(columns) > 2:
            return _stacked(texts, natural, is_right, width)
    if widths != natural:
        texts = _folded(texts, widths)
    return _lines(texts, widths, is_right, gap)


def _one_line(text: str) -> str:
    return printable(text).replace("\t", "\\t")


def _measure(texts: Sequence[str]) -> Callable[[str], int]:
    """The function that measures the width of texts in columns of a terminal."""
    return len if "".join(texts).isascii() else cell_len


def _lines(
    texts: Sequence[Sequence[str]],
    widths: Sequence[int],
    is_right: Sequence[bool],
    gap: str,
) -> Iterator[str]:
    """The lines of columns whose cells fit."""
    aligned = []
    for column, width, right in zip(texts, widths, is_right, strict=True):
        if _measure(column) is len:
            align = str.rjust if right else str.ljust
            aligned.append([align(text, width) for text in column])
        else:
            blanks = [" " * (width - cell_len(text)) for text in column]
            pairs = zip(column, blanks, strict=True)
            aligned.append([blank + text if right else text + blank for text, blank in pairs])
    return (gap.join(row).rstrip() for row in zip(*aligned, strict=True))


def _stacked(
    texts: Sequence[Sequence[str]], natural: Sequence[int], is_right: Sequence[bool], width: int
) -> Iterator[str]:
    """The lines of a table that is too wide: each name is on a line above its numbers."""
    names, *rest = texts
    headings = [column[0] for column in rest]
    widths, gap = _fit(natural[1:], headings, is_right[1:], width - 2, _NARROWEST_BELOW)
    for name, *row in zip(names, *rest, strict=True):
        yield from _fold(name, width)
        for line in _lines(_folded([[cell] for cell in row], widths), widths, is_right[1:], gap):
            yield "  " + line


def _total(widths: Sequence[int], gap: str) -> int:
    return sum(widths) + len(gap) * (len(widths) - 1)


def _fit(
    natural: Sequence[int],
    headings: Sequence[str],
    is_right: Sequence[bool],
    width: int,
    narrowest: int,
) -> tuple[list[int], str]:
    """Widths of the columns, and what is between them; more than the width if nothing helps.

    The widest of text give way first, as far as they can; then the gaps.
    """
    smallest = [max(cell_len(heading), narrowest) for heading in headings]
    for gap in _GAPS:
        widths = list(natural)
        while _total(widths, gap) > width:
            flexible = [
                i for i, right in enumerate(is_right) if not right and widths[i] > smallest[i]
            ]
            if not flexible:
                break
            widths[max(flexible, key=lambda i: widths[i])] -= 1
        if _total(widths, gap) <= width:
            break
    return widths, gap


def _folded(texts: Sequence[Sequence[str]], widths: Sequence[int]) -> list[list[str]]:
    """Columns with more rows, whose cells fit."""
    longer: list[list[str]] = [[] for _ in texts]
    for row in zip(*texts, strict=True):
        cells = [_fold(text, width) for text, width in zip(row, widths, strict=True)]
        height = max(map(len, cells))
        for column, lines in zip(longer, cells, strict=True):
            column += lines
            column += [""] * (height - len(lines))
    return longer


def _fold(text: str, width: int) -> list[str]:
    """Lines of at most a width, broken after dots, underscores and the like if they can be."""
    if len(text) <= width and (text.isascii() or cell_len(text) <= width):
        return [text]
    lines, line = [], ""
    for piece in _PIECES.findall(text):
        if line and cell_len(line + piece.rstrip()) > width:
            lines.append(line.rstrip())
            line = ""
        line += piece
        while cell_len(line.rstrip()) > width:
            cut = width
            while cell_len(line[:cut]) > width:
                cut -= 1
            lines.append(line[: max(cut, 1)])
            line = line[max(cut, 1) :]
    if line.strip():
        lines.append(line.rstrip())
    return lines or [""]


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
            process.write_document(dump(value) + "\n")

    def text(self, text: str = "") -> None:
        """A line of data, with escape sequences in place of what is not visible."""
        if self.is_leader:
            process.write(printable(text) + "\n")

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()
    ) -> None:
        """Rows of plain text below headings; in a file, each row is a line.

        On a terminal, long names are folded, at dots and underscores, if a row is too wide.
        """
        if not self.is_leader:
            return
        is_terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if is_terminal else None
        lines = layout(columns, rows, right=right, width=width)
        first = next(lines)
        is_bold = is_terminal and os.environ.get("TERM") not in (None, "dumb", "unknown")
        heading = f"\x1b[1m{first}\x1b[0m" if is_bold else first
        process.write("\n".join([heading, *lines, ""]))

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

    def __call__(self, state: Progress | Reading) -> None:
        self._show(state.phase, state.num_bytes, state.total_bytes, lambda: describe(state))

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


class Reading:
    """The progress of one process, without torch; call it with the bytes of every piece."""

    def __init__(self, meter: Meter, total_bytes: int) -> None:
        self.phase = "read"
        self.num_bytes = 0
        self.total_bytes = total_bytes
        self.bytes_per_second = 0.0
        self.seconds_left: float | None = None
        self._meter = meter
        self._began = time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.bytes_per_second = self.num_bytes / max(time.monotonic() - self._began, 1e-9)
        if self.bytes_per_second:
            self.seconds_left = (self.total_bytes - self.num_bytes) / self.bytes_per_second
        self._meter(self)


def describe(state: Progress | Reading) -> str:
    """ "1.2 GB of 3.0 GB, 800.0 MB/s, 0:02 left"."""
    text = f"{format_size(state.num_bytes)} of {format_size(state.total_bytes)}"
    left = state.seconds_left
    if left is None:
        return text
    return f"{text}, {format_size(state.bytes_per_second)}/s, {_clock(left)} left"


def describe_windows(state: RunProgress) -> str:
    """ "12 of 128 windows, 3.1/s, 0:37 left"."""
    text = f"{state.num_done:,} of {state.total:,} {state.unit}"
    left = state.seconds_left
    return text if left is None else f"{text}, {state.per_second:.3g}/s, {_clock(left)} left"


def _clock(left: float) -> str:
    minutes, seconds = divmod(round(max(left, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
