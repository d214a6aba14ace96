"""Large files: reserving their blocks, and reading and writing at offsets.

[Note: no mmap] If a mapped file is truncated, or a hole in it meets a full disk, SIGBUS kills the
process; mapped pages also count as its memory. ``preadv`` and ``pwrite`` return errors instead.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator

from distprune.files.disk.access import DISK_IS_FULL, WRITE, check_own_file, write_error, writing
from distprune.files.errors import CheckpointError, OutputError

_MAX_OPEN = 64
# Of the files that a process may open: descriptors left to other code, and the number of instances
# of OpenFiles that share the rest.
_NUM_RESERVED, _NUM_INSTANCES = 32, 4
_PIECE = 16 << 20  # bytes that are copied at a time


class OpenFiles:
    """File descriptors by path; opens files when they are needed and closes the oldest ones.

    At most 64 files are open, or fewer if ``ulimit -n`` is low. If the system refuses to open one
    more, the oldest are closed.

    Args:
        flags: of ``os.open``.
    """

    def __init__(self, flags: int) -> None:
        self._flags = flags | os.O_CLOEXEC
        self._open: OrderedDict[str, int] = OrderedDict()
        self._dirty: set[str] = set()
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if allowed == resource.RLIM_INFINITY:
            allowed = _NUM_RESERVED + _NUM_INSTANCES * _MAX_OPEN
        self._limit = min(max((allowed - _NUM_RESERVED) // _NUM_INSTANCES, 1), _MAX_OPEN)
        self._checksums: dict[str, int] = {}

    def __getitem__(self, path: str) -> int:
        """A file descriptor, valid until the next call.

        Raises:
            OutputError: the process, or the system, may open no more files.
            OSError: any other reason for which the file cannot be opened.
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

    def written(self, path: str, data: memoryview | bytes = b"") -> None:
        """Note that a file has to be synced, and add the data to its checksum."""
        self._dirty.add(path)
        self._checksums[path] = zlib.crc32(data, self._checksums.get(path, 0))

    def take_checksums(self) -> dict[str, int]:
        """By path, the crc32 of the data since the last call, in the order of writing."""
        taken, self._checksums = self._checksums, {}
        return taken

    def sync(self) -> None:
        """Wait until all written data is on the disk.

        Raises:
            OutputError: the disk reports an error.
        """
        for path in sorted(self._dirty):
            with writing(path):
                os.fsync(self[path])
        self._dirty.clear()

    def close(self) -> None:
        """Close all files; a later use opens them again."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def read_into(files: OpenFiles, path: str, offset: int, buffer: memoryview) -> None:
    """Fill a buffer with the bytes of a file from an offset on.

    Args:
        buffer: of bytes; ``array.data`` of a uint8 array, for example.

    Raises:
        CheckpointError: the file cannot be read, or ends too early.
    """
    try:
        descriptor, num_read = files[path], 0
        while num_read < len(buffer):
            count = os.preadv(descriptor, [buffer[num_read:]], offset + num_read)
            if count == 0:
                raise CheckpointError(
                    f"{path} ends at byte {offset + num_read}; expected {offset + len(buffer)}. It "
                    "was truncated after its header was read."
                )
            num_read += count
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def write_from(files: OpenFiles, path: str, offset: int, data: memoryview | bytes) -> None:
    """Write all of the data at an offset.

    Raises:
        OutputError: the disk is full or reports an error.
    """
    view = memoryview(data).cast("B")
    files.written(path, view)
    with writing(path):
        descriptor, num_written = files[path], 0
        while num_written < len(view):
            num_written += os.pwrite(descriptor, view[num_written:], offset + num_written)


def copy_range(
    sources: OpenFiles, source: str, outputs: OpenFiles, output: str, start: int, stop: int
) -> Iterator[int]:
    """Copy the bytes [start, stop) to the same offsets of another file; yields sizes of pieces.

    Raises:
        CheckpointError: the source cannot be read, or ends too early.
        OutputError: the output cannot be written.
    """
    in_kernel = hasattr(os, "copy_file_range")
    buffer = memoryview(b"")
    outputs.written(output)
    while start < stop:
        size = min(_PIECE, stop - start)
        if in_kernel:
            with writing(output):
                target = outputs[output]
            try:
                size = os.copy_file_range(sources[source], target, size, start, start)
            except OSError as error:
                if error.errno in DISK_IS_FULL:
                    raise write_error(output, error) from error
                # Unsupported, or failing: reading and writing will tell which file is to blame.
                in_kernel = False
                continue
            if size == 0:
                read_into(sources, source, start, memoryview(bytearray(1)))  # raises at the end
                in_kernel = False
                continue
        else:
            buffer = buffer or memoryview(bytearray(_PIECE))
            read_into(sources, source, start, buffer[:size])
            write_from(outputs, output, start, buffer[:size])
        start += size
        yield size


# What fallocate answers where it is not supported; a sandbox that blocks the call answers EPERM.
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENODEV}


def allocate(path: str, size: int, mode: int = 0o666) -> None:
    """Make a file of that size if it does not exist, and reserve its blocks; its bytes stay.

    [Note: no emulation] Where a file system cannot reserve blocks, ``posix_fallocate`` of glibc
    reads and writes one byte of every block, which takes hours over a network. ``fallocate`` of
    Linux fails instead; the file then has a hole, and a full disk is noticed while it is filled.

    Args:
        mode: permissions of a new file, less the umask; its owner may always read and write it.

    Raises:
        OutputError: the disk has too few free bytes, or the path is a link, has another hard link,
            or is not a regular file.
    """
    with writing(path):
        descriptor = os.open(path, WRITE | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, mode | 0o600)
        try:
            check_own_file(descriptor, path)
            os.ftruncate(descriptor, size)
            if size:
                try:
                    fallocate(descriptor, size)
                except OSError as error:
                    if error.errno not in _UNSUPPORTED:
                        raise
        finally:
            os.close(descriptor)


def _load_fallocate() -> Callable[[int, int, int, int], int] | None:
    """Linux's call; ``os`` has only ``posix_fallocate``, which may emulate it."""
    if sys.platform != "linux" or sys.maxsize <= 2**32:
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return function


_fallocate = _load_fallocate()


def fallocate(descriptor: int, size: int) -> None:
    """Reserve the blocks of the first bytes of a file.

    Raises:
        OSError: the system's error; ENOSYS where it has no such call.
    """
    if _fallocate is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while _fallocate(descriptor, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
