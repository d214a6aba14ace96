"""Errors of checkpoints on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence


class FilesError(Exception):
    """Base of the errors of checkpoints on disk.

    Args:
        text: the message.
        problems: lines below it.

    Attributes:
        exit_code: of a command that ends with this error.
    """

    exit_code = 1

    def __init__(self, text: str, problems: Sequence[str] = ()) -> None:
        super().__init__("\n  - ".join([text, *problems]))


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
