"""Files: small ones whole, large ones at offsets.

[Note: no mmap] If a mapped file is truncated, or a hole in it meets a full disk, SIGBUS kills the
process; mapped pages also count as its memory. ``preadv`` and ``pwrite`` return errors instead.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from distprune.files.errors import CheckpointError, OutputError

# How output files are opened: a link in their place is an error and is not followed.
WRITE = os.O_RDWR | os.O_NOFOLLOW
NEW = ".new"  # the suffix of a small file while it is written


def write_atomically(path: str | Path, data: bytes | Iterable[bytes]) -> None:
    """Write a small file; after a crash it has either all of the new content or the old one.

    Args:
        path: the path of the file.
        data: its content, or parts of it in order.

    Raises:
        OutputError: it cannot be written.
    """
    path = os.fspath(path)
    new = path + NEW
    with writing(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)  # of a run that was killed
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(new, flags, 0o666)
        try:
            for part in [data] if isinstance(data, bytes) else data:
                write_all(descriptor, part)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(new, path)
        sync_folder(os.path.dirname(path))


def copy_file(source: str | Path, path: str | Path) -> None:
    """Copy the bytes of a file, and wait until they are on the disk."""
    shutil.copyfile(source, path)
    sync_file(path)


def sync_file(path: str | Path) -> None:
    """Wait until the bytes of a file are on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data at the descriptor's position."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(path: str | Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn any OSError into a CheckpointError, whose cause it is."""
    try:
        yield
    except OSError as error:
        name = error.filename or path
        raise CheckpointError(f"{name} cannot be read: {error.strerror}.") from error


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn any OSError into an OutputError, whose cause it is."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}.") from error


class OutputFiles:
    """Files that are written at offsets. Each stays open until it is synced."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._checksums: dict[str, int] = {}

    def write(self, path: str, offset: int, data: memoryview | bytes) -> None:
        """Write all of the data at an offset.

        Raises:
            OutputError: the disk is full or reports an error.
        """
        view = memoryview(data).cast("B")
        with writing(path):
            if path not in self._open:
                self._open[path] = os.open(path, WRITE | os.O_CLOEXEC)
            num_written = 0
            while num_written < len(view):
                num_written += os.pwrite(self._open[path], view[num_written:], offset + num_written)
        self._checksums[path] = zlib.crc32(view, self._checksums.get(path, 0))

    def take_checksums(self) -> dict[str, int]:
        """By path, the crc32 of the data since the last call, in the order of writing."""
        taken, self._checksums = self._checksums, {}
        return taken

    def sync(self) -> None:
        """Wait until all written data is on the disk, and close the files.

        Raises:
            OutputError: the disk reports an error.
        """
        for path in sorted(self._open):
            with writing(path):
                os.fsync(self._open[path])
        self.close()

    def close(self) -> None:
        """Close all files; a later write opens them again."""
        while self._open:
            os.close(self._open.popitem()[1])


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """A file descriptor for reading.

    Raises:
        CheckpointError: the file cannot be opened, or reading it raised OSError.
    """
    with reading(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def fill(descriptor: int, path: str, offset: int, buffer: memoryview) -> None:
    """Fill a buffer with the bytes of an open file from an offset on.

    Args:
        path: for the message.
        buffer: a buffer of bytes; ``array.data`` of a uint8 array, for example.

    Raises:
        CheckpointError: the file ends too early.
    """
    num_read = 0
    while num_read < len(buffer):
        count = os.preadv(descriptor, [buffer[num_read:]], offset + num_read)
        if count == 0:
            raise CheckpointError(
                f"{path} ends at byte {offset + num_read}; expected {offset + len(buffer)}. It "
                "was truncated after its header was read."
            )
        num_read += count


def read_into(path: str, offset: int, buffer: memoryview) -> None:
    """Fill a buffer with the bytes of a file from an offset on; see :func:`fill`.

    Raises:
        CheckpointError: the file cannot be read, or ends too early.
    """
    with opened(path) as descriptor:
        fill(descriptor, path, offset, buffer)


def allocate(path: str, size: int, mode: int = 0o666) -> None:
    """Make a file of that size if it does not exist; its bytes stay.

    Args:
        mode: permissions of a new file, less the umask; its owner may always read and write it.

    Raises:
        OutputError: the file cannot be written, or is a link.
    """
    with writing(path):
        descriptor = os.open(path, WRITE | os.O_CREAT | os.O_CLOEXEC, mode | 0o600)
        try:
            os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)
