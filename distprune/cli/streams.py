"""stdout and stderr as a command finds them: closed, full, of any encoding, or a broken pipe."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from distprune.files.errors import OutputError


class ReaderGone(Exception):
    """Nobody reads stdout any more, as after ``| head``. No OSError: the parser ends on EPIPE."""


class _State:
    has_document = False  # whether a JSON document was begun on stdout


def prepare() -> None:
    """Make the standard streams usable, whatever they are; once, before anything is written.

    A stream that is closed becomes /dev/null: the next file that is opened would be in its place.
    What an encoding lacks is written as an escape sequence.
    """
    _State.has_document = False
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
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
    """Write to stdout.

    Raises:
        ReaderGone: nobody reads it.
        OutputError: it cannot be written.
    """
    with _writing():
        sys.stdout.write(text)


def write_document(text: str) -> None:
    """Write the JSON document of a command; there is one, so later ones are dropped.

    Raises:
        ReaderGone: nobody reads it.
        OutputError: it cannot be written.
    """
    if _State.has_document:
        return
    _State.has_document = True
    with _writing():
        sys.stdout.write(text)
        sys.stdout.flush()


def has_document() -> bool:
    """Whether a JSON document was begun."""
    return _State.has_document


def flush() -> None:
    """Write out what is still in memory.

    Raises:
        ReaderGone: nobody reads it.
        OutputError: it cannot be written.
    """
    with _writing():
        sys.stdout.flush()


def flush_errors() -> None:
    """Write out what is left for stderr, if that can be written."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        give_up(sys.stderr, sys.__stderr__)


def give_up(stream: TextIO | None, original: TextIO | None) -> None:
    """Let what is left go nowhere: Python would try to write it once more when it ends.

    Args:
        stream: sys.stdout or sys.stderr.
        original: what it was when the process began; another one is left alone.
    """
    if stream is not None and stream is original:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


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
