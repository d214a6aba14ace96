"""What can go wrong with a checkpoint on disk; each kind has the exit code of a program."""

from __future__ import annotations

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


class Interrupted(FilesError):
    """The caller asked to stop; what is written so far is kept for the next run."""

    exit_code = 143


def counted(what: str, problems: Sequence[str]) -> str:
    """A headline: "SRC has 2 problems:"."""
    return f"{what} has {len(problems)} problem{'s' if len(problems) != 1 else ''}:"


def sized(num_bytes: float) -> str:
    """ "1.5 GB"; decimal units, as disks have them."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
