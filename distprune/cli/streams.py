"""stdout and stderr in any state (closed, full, of any encoding, a broken pipe), and text for them.

Text of unknown origin, such as names in files, may hold escape sequences of terminals.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from distprune.files.errors import OutputError

_HARMLESS = "\t"


def printable(text: str) -> str:
    """Write every character that is not visible as an escape sequence.

    These are control characters ("\\x1b", a line break), marks that change the direction of text,
    other spaces, and bytes of file names that are not UTF-8. A tab stays.
    """
    if text.isprintable():
        return text
    return _NOT_ASCII_PRINTABLE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    character = match.group()
    if character.isprintable() or character in _HARMLESS:
        return character
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # a byte of a file name
        number -= 0xDC00
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


_NOT_ASCII_PRINTABLE = re.compile(r"[^ -~]")


class ReaderGone(Exception):
    """The reader of stdout is gone, as after ``| head``. Not an OSError: typer exits on EPIPE."""


class _State:
    has_document = False  # whether a JSON document was started on stdout


def prepare() -> None:
    """Make the standard streams usable in any state; call it once, before anything is written.

    A closed stream becomes /dev/null: otherwise the next file that is opened would get its number.
    Characters that an encoding lacks are written as escape sequences.
    """
    _State.has_document = False
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(ValueError, OSError):
                stream.reconfigure(errors="backslashreplace")


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for JSON."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options


def write(text: str) -> None:
    """Write to stdout."""
    with _writing():
        sys.stdout.write(text)


def write_document(text: str) -> None:
    """Write the JSON document of a command, unless one has been written."""
    if _State.has_document:
        return
    _State.has_document = True
    with _writing():
        sys.stdout.write(text)
        sys.stdout.flush()


def has_document() -> bool:
    """Whether a JSON document was started."""
    return _State.has_document


def flush() -> None:
    """Flush stdout."""
    with _writing():
        sys.stdout.flush()


def flush_errors() -> None:
    """Flush stderr, if it can be written."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        give_up(sys.stderr, sys.__stderr__)


def give_up(stream: TextIO | None, original: TextIO | None) -> None:
    """Discard what is left in a buffer, which Python would try to write again when it ends."""
    if stream is not None and stream is original:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        give_up(sys.stdout, sys.__stdout__)
        raise ReaderGone from error
    except OSError as error:
        give_up(sys.stdout, sys.__stdout__)
        raise OutputError(f"stdout cannot be written: {error.strerror}.") from error
