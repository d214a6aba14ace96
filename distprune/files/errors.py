"""Errors of checkpoints on disk, and names, sizes and fractions as messages have them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


class FilesError(Exception):
    """Base of the errors of checkpoints on disk.

    Attributes:
        exit_code: of a command that ends with this error.
    """

    exit_code = 1


class SelectionError(FilesError):
    """The recipe is invalid, or does not fit the checkpoint."""

    exit_code = 2


class CheckpointError(FilesError):
    """The source is malformed, incomplete, not supported, or has changed."""


class NaNError(CheckpointError):
    """A selected tensor holds NaN, which has no place in a ranking."""


class TextError(FilesError, ValueError):
    """A text file cannot be read, is not UTF-8, or is too short."""


class OutputError(FilesError):
    """The destination exists, is in use, or cannot be written, or memory is missing."""


class RanksError(FilesError):
    """The ranks disagree on what to do, or one of them was lost."""


def explained(error: BaseException) -> FilesError | None:
    """The FilesError for an error that the machine has caused; None for a defect of distprune."""
    if isinstance(error, FilesError):
        return error
    if isinstance(error, OSError):
        path = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return OutputError(f"{path}{error.strerror or error}.")
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch says so
        return OutputError(f"there is too little memory: {error}.")
    return None


@contextlib.contextmanager
def translated(kind: type[FilesError], option: str = "") -> Iterator[None]:
    """Give errors of the library, which are Python's, the exit codes of the command line.

    Args:
        kind: of the errors.
        option: that they are about, and a colon.
    """
    try:
        yield
    except FilesError:
        raise
    except (ValueError, NotImplementedError) as error:
        raise kind(f"{option}{error}") from error
    except ImportError as error:
        raise SelectionError(str(error)) from error
    except RuntimeError as error:
        if "RANK" in os.environ and explained(error) is None:
            raise RanksError(
                f"a rank failed, was lost, or did not answer in time ({error})."
            ) from error
        raise


def printable(text: str) -> str:
    """A text with escape sequences in place of what is not visible, such as "\\x1b" or "\\n"."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def format_size(num_bytes: float) -> str:
    """ "1.5 GB": a size in decimal units, which are those of disks."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def format_percent(part: int, whole: int) -> str:
    """ "12.34 %"; 0.00 and 100.00 only if the fraction is exactly that; "-" if the whole is 0."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < part < whole:
        percent = min(max(percent, 0.01), 99.99)
    return f"{percent:.2f} %"
