"""Errors of checkpoints on disk."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Sequence


class FilesError(Exception):
    """Base of the errors of checkpoints on disk.

    Attributes:
        headline: the message without the problems.
        problems: all details; may be empty.
        exit_code: of a command that ends with this error.
    """

    exit_code = 1

    def __init__(self, headline: str, problems: Sequence[str] = ()) -> None:
        self.headline = headline
        self.problems = tuple(problems)
        super().__init__("\n  - ".join([headline, *self.problems]))

    def say_more(self, text: str) -> None:
        """Append a sentence to the message."""
        self.args = (f"{self}{chr(10) if self.problems else ' '}{text}",)


class SelectionError(FilesError):
    """The recipe is invalid, or does not fit the checkpoint."""

    exit_code = 2


class CheckpointError(FilesError):
    """The source is malformed, incomplete, not supported, or has changed."""


class NaNError(CheckpointError):
    """A selected tensor holds NaN, and the recipe does not say ``nan: keep``."""


class TextError(FilesError, ValueError):
    """A text file cannot be read, is not UTF-8, or is too short."""


class OutputError(FilesError):
    """The destination exists, is in use, or cannot be written."""


class RanksError(FilesError):
    """The ranks disagree on what to do, or one of them was lost."""


class MachineError(FilesError):
    """The machine has too little memory, or allows too few open files or processes."""


class Interrupted(FilesError):
    """The caller asked to stop; finished work is kept for the next run."""


_OUT_OF_MEMORY = re.compile(
    r"(?i)cannot allocate memory|can't allocate memory|failed to map segment|out of memory|"
    r"unable to allocate|cannot (create|map) .*(shared object|object file)"
)
_NO_THREAD = "can't start new thread"


def explained(error: BaseException) -> FilesError | None:
    """The FilesError for an error that the machine or a file has caused.

    Args:
        error: any; a FilesError is returned as it is.

    Returns:
        None if the error is a defect of distprune.
    """
    if isinstance(error, FilesError):
        return error
    if isinstance(error, RecursionError):
        return CheckpointError("a file is nested too deeply to be read; it is damaged.")
    memory = _lack_of_memory(error)
    if memory is not None:
        return MachineError(
            f"there is too little memory ({memory}). Free some, or raise the limit "
            "(`ulimit -v`, or that of the container or job)."
        )
    if not isinstance(error, OSError):
        return None
    reason = error.strerror or str(error)
    path = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return MachineError(f"{path}{reason}. Allow more open files (`ulimit -n`).")
    return OutputError(f"{path}{reason}.")


def _lack_of_memory(error: BaseException) -> str | None:
    """The message of a lack of memory among an error and its causes; None if there is none."""
    visited: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        visited.add(id(cause))
        text = str(cause)
        if isinstance(cause, MemoryError):
            return text or "MemoryError"
        is_system = isinstance(cause, (OSError, ImportError, RuntimeError))
        if is_system and (getattr(cause, "errno", None) == errno.ENOMEM or _NO_THREAD in text):
            return text
        has_limit = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        if isinstance(cause, SystemError) and has_limit:  # C code whose malloc failed
            return text
        if is_system and _OUT_OF_MEMORY.search(text):
            return text.splitlines()[0]
        cause = cause.__cause__ or cause.__context__
    return None


def headline(subject: str, problems: Sequence[str]) -> str:
    """The headline of an error with problems: "SRC has 2 problems:"."""
    return f"{subject} has {len(problems)} problem{'s' if len(problems) != 1 else ''}:"


MAX_PROBLEMS = 12  # that an error shows


def shown(problems: Sequence[str], rest: str = "more tensors.") -> list[str]:
    """The first of many problems, and how many more there are: "3 more tensors."."""
    num_more = len(problems) - MAX_PROBLEMS
    return [*problems[:MAX_PROBLEMS], *([f"{num_more} {rest}"] if num_more > 0 else [])]
