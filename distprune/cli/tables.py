"""Tables of plain text: a hundred thousand rows in a second, and none wider than a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.cells import cell_len

from distprune.cli.escaping import printable

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

    Args:
        columns: the headings.
        rows: as many texts each.
        right: headings of the columns that are aligned to the right and never folded.
        width: of the terminal; None: every row is one line, however long.

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
