"""The path of a result, checked before anything is written, and of its unfinished folders."""

from __future__ import annotations

import os
import re
from pathlib import Path

from distprune.files.disk.access import writing
from distprune.files.errors import OutputError
from distprune.files.text import printable

# Added to the name of an unfinished result: ".partial-", sixteen digits, and a suffix.
_LONGEST_SUFFIX = 30
_MAX_NAME = 255  # bytes; for file systems that do not report it


def resolve_destination(destination: str | Path) -> Path:
    """The absolute path of a result.

    Raises:
        OutputError: it has no name (as ``/``), its name is too long to add a suffix, or its parent
            is not a folder.
    """
    try:
        path = Path(os.path.abspath(destination))
        shown = printable(str(path))
        if not path.name:
            raise OutputError(f"{shown} has no name; expected that of a new folder.")
        if "\0" in path.name:
            raise ValueError("its name has a NUL byte")
        os.stat(path.parent)
    except FileNotFoundError:
        raise OutputError(
            f"{printable(str(path.parent))} is not a folder; create it first."
        ) from None
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OutputError(f"{printable(str(destination))} cannot be created: {reason}.") from error
    length, limit = len(os.fsencode(path.name)), _max_name(path.parent)
    if length + _LONGEST_SUFFIX > limit:
        raise OutputError(
            f"the name of {shown} has {length} bytes; expected at most {limit - _LONGEST_SUFFIX}: "
            f"the file system allows {limit}, and '.partial-' with a number is added at first."
        )
    return path


def partial_folders(destination: Path) -> list[Path]:
    """The folders of unfinished results of a destination, whichever command made them."""
    pattern = re.compile(
        re.escape(destination.name) + r"\.partial-([0-9a-f]{16}(\.work)?|apply|convert|save)"
    )
    with writing(destination.parent):
        names = sorted(os.listdir(destination.parent))
    return [destination.with_name(name) for name in names if pattern.fullmatch(name)]


def _max_name(folder: Path) -> int:
    try:
        return os.pathconf(folder, "PC_NAME_MAX")
    except (OSError, ValueError):
        return _MAX_NAME
