"""The path of a result, its unfinished folders, and the free bytes of its disk."""

from __future__ import annotations

import contextlib
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


_BLOCK = 512  # bytes; the unit of st_blocks


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the file system of a folder.

    Raises:
        OutputError: the file system does not say.
    """
    with writing(folder):
        disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def check_free_bytes(folder: Path, num_needed: int, destination: Path) -> None:
    """Raise OutputError if a folder's file system has fewer free bytes than are needed.

    Args:
        folder: an existing one.
        num_needed: bytes, in addition to those that are on the disk.
        destination: named in the message.
    """
    num_free = free_bytes(folder)
    if num_needed > num_free:
        raise OutputError(
            f"{destination} needs {num_needed:,} more bytes, but {num_free:,} are free there. "
            "Make room and run the same command again, or choose another destination."
        )


def missing_bytes(path: Path, size: int) -> int:
    """Bytes that the file system has not yet allocated of a file that will have this size."""
    return max(size - path.stat().st_blocks * _BLOCK, 0) if path.exists() else size


def folder_bytes(folder: Path) -> int:
    """Bytes that the files of a folder take on the disk; files that cannot be read count as 0."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * _BLOCK
    return total
