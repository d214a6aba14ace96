"""Tables of plain text: a hundred thousand rows in a second, and none wider than a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.cells import cell_len

from distprune.cli.escaping import printable

_GAP = "  "
_NARROWEST = 16  # columns of text are not folded to less
# Where a name may be folded: after these, each piece with what follows it.
_PIECES = re.compile(r"[^._/\s-]*[._/\s-]*")


def layout(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    width: int | None = None,
) -> Iterator[str]:
    """The lines of a table, the headings first.

    Args:
        columns: the headings.
        rows: as many texts each.
        right: headings of the columns that are aligned to the right and never folded.
        width: of the terminal; None: every row is one line, however long.

    Cost: a second for 100,000 rows of six columns.
    """
    cells = [[printable(text).replace("\t", "\\t") for text in row] for row in rows]
    is_right = [column in right for column in columns]
    texts_below = zip(*cells, strict=True) if cells else [()] * len(columns)
    wanted = [
        max([_length(column), *map(_length, texts)])
        for column, texts in zip(columns, texts_below, strict=True)
    ]
    widths = _fit(wanted, [_length(column) for column in columns], is_right, width)
    for row in (columns, *cells):
        if all(_length(text) <= width for text, width in zip(row, widths, strict=True)):
            yield _line(row, widths, is_right)
            continue
        folded = [_fold(text, width) for text, width in zip(row, widths, strict=True)]
        for number in range(max(map(len, folded))):
            texts = [lines[number] if number < len(lines) else "" for lines in folded]
            yield _line(texts, widths, is_right)


def _length(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def _line(row: Sequence[str], widths: Sequence[int], is_right: Sequence[bool]) -> str:
    parts = []
    for text, width, right in zip(row, widths, is_right, strict=True):
        blank = " " * (width - _length(text))
        parts.append(blank + text if right else text + blank)
    return _GAP.join(parts).rstrip()


def _fit(
    wanted: Sequence[int], headings: Sequence[int], is_right: Sequence[bool], width: int | None
) -> list[int]:
    """Widths of the columns: the widest of text give way first."""
    widths = list(wanted)
    if width is None:
        return widths
    smallest = [max(heading, _NARROWEST) for heading in headings]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        flexible = [i for i, right in enumerate(is_right) if not right and widths[i] > smallest[i]]
        if not flexible:
            break
        widths[max(flexible, key=lambda i: widths[i])] -= 1
    return widths


def _fold(text: str, width: int) -> list[str]:
    """Lines of at most a width, broken after dots, underscores and the like if they can be."""
    lines, line = [], ""
    for piece in _PIECES.findall(text):
        if _length(line + piece.rstrip()) > width and line:
            lines.append(line.rstrip())
            line = ""
        line += piece
        while _length(line.rstrip()) > width:
            cut = width
            while _length(line[:cut]) > width:
                cut -= 1
            lines.append(line[: max(cut, 1)])
            line = line[max(cut, 1) :]
    if line.strip():
        lines.append(line.rstrip())
    return lines or [""]
