"""The path of a result: its unfinished folders, the free bytes of its disk, and its lock.

A run holds ``flock`` on the lock file, and removes the file when it ends. The system releases
``flock`` when a process ends, however it ends. Where the file system has no ``flock``, there is no
lock: let one run at a time work on a destination there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path

from distprune.files.disk.access import WRITE, writing
from distprune.files.errors import OutputError


def resolve_destination(destination: str | Path) -> Path:
    """The absolute path of a result; OutputError if it has no name, as ``/``."""
    path = Path(os.path.abspath(destination))
    if not path.name:
        raise OutputError(f"{path} has no name; expected that of a new folder.")
    return path


def partial_folders(destination: Path) -> list[Path]:
    """The folders of unfinished results of a destination, whichever command made them."""
    name = re.escape(destination.name) + r"(\.partial-text-[0-9]+)?"
    pattern = re.compile(name + r"\.partial-([0-9a-f]{16}(\.work)?|apply|save|text(-[0-9]+)?)")
    with writing(destination.parent):
        names = sorted(os.listdir(destination.parent))
    return [destination.with_name(name) for name in names if pattern.fullmatch(name)]


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


class Lock:
    """One run at a time on a destination.

    Args:
        destination: absolute.

    Attributes:
        path: the path of the lock file.
    """

    def __init__(self, destination: Path) -> None:
        self.path = f"{destination}.partial.lock"
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            OutputError: another run has it, or the file cannot be written.
        """
        while True:
            with writing(self.path):
                descriptor = os.open(self.path, WRITE | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise OutputError(
                    f"another run is at work on this destination: it holds {self.path}. Wait for "
                    "it, or end it."
                ) from None
            except OSError:
                pass  # there is no flock
            with contextlib.suppress(FileNotFoundError):  # another run has removed it meanwhile
                if os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                    self._descriptor = descriptor
                    return
            os.close(descriptor)

    def release(self) -> None:
        """Give the lock back, if this run has it."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            os.close(self._descriptor)
            self._descriptor = None
