"""The place of a result, checked for what no file system can hold before anything is made."""

from __future__ import annotations

import os
import re
from pathlib import Path

from distprune.files.disk.access import writing
from distprune.files.disk.listing import ascii_name
from distprune.files.errors import OutputError

# What is added to the name while the result is made: ".partial-", sixteen digits, and an ending.
_LONGEST_SUFFIX = 30
_MAX_NAME = 255  # bytes, of file systems that do not say


def resolve_destination(destination: str | Path) -> Path:
    """The absolute path of a result.

    Raises:
        OutputError: it has no name (as ``/``), its name leaves no room for those that are used
            while it is made, or nothing can be made there.
    """
    try:
        path = Path(os.path.abspath(destination))
        shown = ascii_name(str(path))
        if not path.name:
            raise OutputError(f"{shown} has no name; expected that of a new folder.")
        if "\0" in path.name:
            raise ValueError("a NUL in a name")
        os.stat(path.parent)
    except FileNotFoundError:
        raise OutputError(f"{ascii_name(str(path.parent))} is no folder; make it first.") from None
    except (OSError, ValueError) as error:  # ValueError: of a NUL byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OutputError(f"{ascii_name(str(destination))} cannot be made: {reason}.") from error
    length, limit = len(os.fsencode(path.name)), _max_name(path.parent)
    if length + _LONGEST_SUFFIX > limit:
        raise OutputError(
            f"the name of {shown} has {length} bytes; expected at most {limit - _LONGEST_SUFFIX}: "
            f"the file system allows {limit}, and '.partial-' with a number is added meanwhile."
        )
    return path


def partial_folders(destination: Path) -> list[Path]:
    """All that unfinished results of a destination are in, whatever made them."""
    pattern = re.compile(
        re.escape(destination.name) + r"\.partial-([0-9a-f]{16}(\.work)?|apply|convert)"
    )
    with writing(destination.parent):
        names = sorted(os.listdir(destination.parent))
    return [destination.with_name(name) for name in names if pattern.fullmatch(name)]


def _max_name(folder: Path) -> int:
    try:
        return os.pathconf(folder, "PC_NAME_MAX")
    except (OSError, ValueError):
        return _MAX_NAME
