"""Sparsity per tensor as CSV: for spreadsheets, and for programs that do not read JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

from distprune.cli import streams
from distprune.files.errors import OutputError
from distprune.files.inspecting import TensorFacts
from distprune.files.selecting.kinds import role_of

COLUMNS = (
    "name", "file", "dtype", "shape", "elements", "zeros", "sparsity", "nan", "inf", "pruned",
    "layer", "kind",
)  # fmt: skip
# What a spreadsheet takes for a formula at the beginning of a cell.
_FORMULA = "=+-@"


def check(path: Path) -> None:
    """Check that the file can be written, before all weights are read; "-" is stdout.

    Raises:
        OutputError: its folder does not exist, or it is a folder itself.
    """
    if str(path) == "-":
        return
    if not path.absolute().parent.is_dir():
        raise OutputError(f"--csv {path}: its folder does not exist; make it first.")
    if path.is_dir():
        raise OutputError(f"--csv {path}: this is a folder; expected the name of a file, or -.")


def write(path: Path, facts: Iterable[TensorFacts], num_pruned: Mapping[str, int] | None) -> None:
    """Write a heading and a row for each tensor.

    A cell has no control characters in it: those in names are written as in Python ("\\n",
    "\\x1b"), and so is a backslash, and a first character that would make the cell a formula.

    Args:
        path: of the file, which is replaced if it exists; "-": stdout.
        facts: of the tensors, in the order of the rows. ``zeros`` and ``sparsity`` are left empty
            where they are not known.
        num_pruned: elements that were pruned, by tensor, from the report of a pruned checkpoint;
            None leaves the column empty.

    Raises:
        OutputError: it cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for tensor in facts:
        writer.writerow(_row(tensor, num_pruned))
    if str(path) == "-":
        streams.write(text.getvalue())
        return
    try:
        path.write_text(text.getvalue(), encoding="utf-8", newline="")
    except OSError as error:
        raise OutputError(f"--csv {path} cannot be written: {error.strerror}.") from error


def safe(text: str) -> str:
    """A name for a cell; ``text.encode().decode("unicode_escape")`` undoes it for ASCII."""
    escaped = "".join(
        character.encode("unicode_escape").decode()
        if character == "\\" or not character.isprintable()
        else character
        for character in text
    )
    return f"\\x{ord(escaped[0]):02x}{escaped[1:]}" if escaped[:1] in [*_FORMULA] else escaped


def _row(facts: TensorFacts, num_pruned: Mapping[str, int] | None) -> tuple[object, ...]:
    entry, place = facts.entry, role_of(facts.entry.name)
    share = ""
    if facts.num_zero is not None and entry.numel:
        share = repr(facts.num_zero / entry.numel)
    return (
        safe(entry.name),
        safe(entry.file),
        safe(entry.dtype),
        "x".join(map(str, entry.shape)) or "scalar",
        entry.numel,
        "" if facts.num_zero is None else facts.num_zero,
        share,
        facts.num_nan,
        facts.num_inf,
        "" if num_pruned is None else num_pruned.get(entry.name, 0),
        safe(".".join([place.stack, *map(str, place.layer)]).strip(".")) if place.layer else "",
        safe(place.kind),
    )
