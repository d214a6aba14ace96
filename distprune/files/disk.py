"""Reading and writing files at offsets: no memory maps, nothing shorter than asked for.

[Note: no mmap] A mapped file that is truncated, or a hole on a full disk, kills the process
with SIGBUS, and mapped pages count as its memory. preadv and pwrite return errors.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from distprune.files.errors import CheckpointError, OutputError

_MAX_OPEN = 64
# Of the files that a process may open: for whatever else it has open, and how many OpenFiles
# there may be at once.
_RESERVED, _SHARES = 32, 4
_NOT_SUPPORTED = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF}


class OpenFiles:
    """The files that a rank has open: a few, however many there are.

    How few depends on what the process may open (``ulimit -n``). Where the system refuses one more,
    the oldest are closed until it does not.

    Args:
        flags: of ``os.open``.
    """

    def __init__(self, flags: int) -> None:
        self._flags = flags | os.O_CLOEXEC
        self._open: OrderedDict[str, int] = OrderedDict()
        self._dirty: set[str] = set()
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if allowed == resource.RLIM_INFINITY:
            allowed = _RESERVED + _SHARES * _MAX_OPEN
        self._limit = min(max((allowed - _RESERVED) // _SHARES, 1), _MAX_OPEN)

    def __getitem__(self, path: str) -> int:
        """A file descriptor; it is valid until another one is asked for.

        Raises:
            OutputError: the process, or the system, may open no more files.
            OSError: whatever else keeps the file from being opened.
        """
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        while len(self._open) >= self._limit:
            self._close_oldest()
        while True:
            try:
                self._open[path] = os.open(path, self._flags)
                return self._open[path]
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                if not self._open:
                    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                    raise OutputError(
                        f"{path} cannot be opened: {error.strerror}. This process may open "
                        f"{allowed} (ulimit -n); raise the limit, or close what else is open."
                    ) from error
                self._limit = len(self._open)
                self._close_oldest()

    def _close_oldest(self) -> None:
        _, oldest = self._open.popitem(last=False)
        os.close(oldest)

    def written(self, path: str) -> None:
        """Note that a file has to be synced."""
        self._dirty.add(path)

    def sync(self) -> None:
        """Wait until all that was written is on the disk.

        Raises:
            OutputError: the disk could not take it.
        """
        for path in sorted(self._dirty):
            with writing(path):
                os.fsync(self[path])
        self._dirty.clear()

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def read_into(files: OpenFiles, path: str, offset: int, buffer: memoryview) -> None:
    """Fill a buffer with the bytes of a file from an offset on.

    Raises:
        CheckpointError: the file cannot be read, or ends before.
    """
    try:
        descriptor, done = files[path], 0
        while done < len(buffer):
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{path} ends at byte {offset + done}; expected {offset + len(buffer)}. It was "
                    "truncated after its header was read."
                )
            done += count
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def write_from(files: OpenFiles, path: str, offset: int, data: memoryview | bytes) -> None:
    """Write all of the data at an offset.

    Raises:
        OutputError: the disk is full, or broken.
    """
    view = memoryview(data).cast("B")
    files.written(path)
    with writing(path):
        descriptor, done = files[path], 0
        while done < len(view):
            done += os.pwrite(descriptor, view[done:], offset + done)


def copy_range(
    sources: OpenFiles, source: str, outputs: OpenFiles, output: str, start: int, stop: int
) -> Iterator[int]:
    """Copy bytes to the same place in another file; yields the size of each piece.

    Raises:
        CheckpointError: the source cannot be read, or ends before.
        OutputError: the output cannot be written.
    """
    piece = 16 << 20
    in_kernel = hasattr(os, "copy_file_range")
    buffer = memoryview(b"")
    outputs.written(output)
    while start < stop:
        size = min(piece, stop - start)
        if in_kernel:
            with writing(output):
                try:
                    size = os.copy_file_range(sources[source], outputs[output], size, start, start)
                except OSError as error:
                    if error.errno not in _NOT_SUPPORTED:
                        raise
                    in_kernel = False
                    continue
            if size == 0:
                read_into(sources, source, start, memoryview(bytearray(1)))  # says what is wrong
                in_kernel = False
                continue
        else:
            buffer = buffer or memoryview(bytearray(piece))
            read_into(sources, source, start, buffer[:size])
            write_from(outputs, output, start, buffer[:size])
        start += size
        yield size


def allocate(path: str, size: int, mode: int = 0o666) -> None:
    """Make a file of that size if it is not there, and reserve its blocks; its bytes stay.

    Args:
        mode: permissions of a new file, less the umask; its owner may always read and write it.

    Raises:
        OutputError: there is not enough room.
    """
    with writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode | 0o600)
        try:
            os.ftruncate(descriptor, size)
            if size and hasattr(os, "posix_fallocate"):
                try:
                    os.posix_fallocate(descriptor, 0, size)
                except OSError as error:
                    if error.errno not in _NOT_SUPPORTED:
                        raise
        finally:
            os.close(descriptor)


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write a small file so that it is there in full, or as it was before.

    Raises:
        OutputError: it cannot be written.
    """
    path = os.fspath(path)
    with writing(path):
        descriptor = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(path + ".new", path)
        sync_folder(os.path.dirname(path))


def sync_folder(path: str | Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn a failure to write into an OutputError that says what to do.

    Raises:
        OutputError: in place of any OSError.
    """
    try:
        yield
    except OSError as error:
        hint = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = " Make room and run the same command again: it goes on where it stopped."
        raise OutputError(f"{path} cannot be written: {error.strerror}.{hint}") from error
