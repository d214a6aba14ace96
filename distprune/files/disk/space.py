"""Free and used bytes of disks."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from distprune.files.disk.access import writing
from distprune.files.errors import OutputError

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
