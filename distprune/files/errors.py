"""What can go wrong with a checkpoint on disk; each kind has the exit code of a program."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence


class FilesError(Exception):
    """Base of the errors here.

    Attributes:
        headline: what is wrong, without the details.
        problems: the details, all that were found; may be empty.
        exit_code: what a command line program should return.
    """

    exit_code = 1

    def __init__(self, headline: str, problems: Sequence[str] = ()) -> None:
        self.headline = headline
        self.problems = tuple(problems)
        super().__init__("\n  - ".join([headline, *self.problems]))

    def say_more(self, text: str) -> None:
        """Add a sentence at the end, for whoever reads the message."""
        self.args = (f"{self}{chr(10) if self.problems else ' '}{text}",)


class SelectionError(FilesError):
    """The recipe does not fit the checkpoint, or is wrong in itself."""

    exit_code = 2


class CheckpointError(FilesError):
    """The source is malformed, incomplete, of a kind that is not supported, or has changed."""

    exit_code = 3


class NaNError(CheckpointError):
    """A selected tensor holds NaN, and the recipe does not say to keep them."""


class OutputError(FilesError):
    """The destination exists, is in use, or cannot be written."""

    exit_code = 4


class RanksError(FilesError):
    """The ranks disagree in what they are to do, or one of them was lost."""

    exit_code = 5


class MachineError(FilesError):
    """This machine has too little memory, or allows too few open files or processes."""

    exit_code = 7


class Interrupted(FilesError):
    """The caller asked to stop; what is written so far is kept for the next run."""

    exit_code = 143


_OUT_OF_MEMORY = re.compile(
    r"(?i)cannot allocate memory|can't allocate memory|failed to map segment|out of memory|"
    r"unable to allocate|cannot (create|map) .*(shared object|object file)"
)
_NO_THREAD = "can't start new thread"


def explained(error: BaseException) -> FilesError | None:
    """An error as one of those here, if it comes from the machine or a file; None: a defect.

    Args:
        error: any; one of those here is returned as it is.
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
    what = error.strerror or str(error)
    where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return MachineError(f"{where}{what}. Allow more open files (`ulimit -n`).")
    return OutputError(f"{where}{what}.")


def _lack_of_memory(error: BaseException) -> str | None:
    """What a lack of memory says of itself, if that is what led to an error."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        text = str(each)
        if isinstance(each, MemoryError):
            return text or "MemoryError"
        is_system = isinstance(each, (OSError, ImportError, RuntimeError))
        if is_system and (getattr(each, "errno", None) == errno.ENOMEM or _NO_THREAD in text):
            return text
        if isinstance(each, SystemError) and _has_limit():  # what C code makes of a failed malloc
            return text
        if is_system and _OUT_OF_MEMORY.search(text):
            return text.splitlines()[0]
        each = each.__cause__ or each.__context__
    return None


def _has_limit() -> bool:
    try:
        import resource
    except ImportError:
        return False
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def headline(what: str, problems: Sequence[str]) -> str:
    """A headline: "SRC has 2 problems:"."""
    return f"{what} has {len(problems)} problem{'s' if len(problems) != 1 else ''}:"


def format_size(num_bytes: float) -> str:
    """ "1.5 GB": a size in decimal units, which are those of disks."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
