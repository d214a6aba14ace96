"""Files: small ones whole, large ones at offsets; and whether they belong to distprune.

[Note: no mmap] If a mapped file is truncated, or a hole in it meets a full disk, SIGBUS kills the
process; mapped pages also count as its memory. ``preadv`` and ``pwrite`` return errors instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import secrets
import shutil
import stat
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

from distprune.files.errors import CheckpointError, OutputError

# How output files are opened: a link in their place is an error and is not followed.
WRITE = os.O_RDWR | os.O_NOFOLLOW
NEW = ".new"  # the suffix of a small file while it is written
DISK_IS_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


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


def read_small(path: str | Path) -> bytes:
    """All bytes of a regular file.

    Raises:
        OSError: it cannot be read, is a link, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        return file.read()


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


def check_own_file(file: int | str, path: str | Path) -> None:
    """Raise OutputError unless a file is regular and has a single name.

    Args:
        file: a descriptor, or a path; a link is not followed.
        path: for the message.
    """
    info = os.stat(file, follow_symlinks=isinstance(file, int))
    if stat.S_ISLNK(info.st_mode):
        problem = f"is a link to {os.readlink(path)!a}"
    elif not stat.S_ISREG(info.st_mode):
        problem = "is not a regular file"
    elif info.st_nlink > 1:
        problem = f"has {info.st_nlink} hard links"
    else:
        return
    raise OutputError(
        f"{path} {problem}; expected a file that distprune made and that has no other name. "
        "Nothing was written to it. Remove it, or choose another destination."
    )


def check_owner(path: str | Path) -> None:
    """Raise OutputError if a file or folder belongs to another user.

    Some file systems map all files to one user. A temporary file beside the path shows which user
    the files of this process are mapped to.
    """
    owner = os.lstat(path).st_uid
    if owner == os.geteuid():
        return
    probe = f"{path}.{secrets.token_hex(4)}"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        mine = os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        os.unlink(probe)
    if owner != mine:
        raise OutputError(
            f"{path} belongs to another user (uid {owner}; this process writes as {mine}). Nothing "
            "was changed. Let its owner remove it, or choose another destination."
        )


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn any OSError into a CheckpointError, whose cause it is."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn any OSError into an OutputError that says what to do.

    Raises:
        OutputError: in place of the OSError, which is its cause.
    """
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


def write_error(path: str | Path, error: OSError) -> OutputError:
    """The OutputError for a failure to write."""
    hint = ""
    if error.errno in DISK_IS_FULL:
        hint = " Make room and run the same command again."
    elif error.errno == errno.ELOOP:
        hint = " It is a link, which is not followed. Remove it, or choose another destination."
    return OutputError(f"{path} cannot be written: {error.strerror}.{hint}")


_MAX_OPEN = 32
# Of the files that a process may open: descriptors left to other code, which cannot close files of
# OpenFiles to open its own, and the number of instances of OpenFiles that share the rest.
_NUM_RESERVED, _NUM_INSTANCES = 32, 4
_PIECE = 16 << 20  # bytes that are copied at a time


class OpenFiles:
    """File descriptors by path; opens files when they are needed and closes the oldest ones.

    At most 32 files are open, or fewer if ``ulimit -n`` is low. If the system refuses to open one
    more, the oldest are closed.

    Args:
        flags: those of ``os.open``.
    """

    def __init__(self, flags: int) -> None:
        self._flags = flags | os.O_CLOEXEC
        self._open: OrderedDict[str, int] = OrderedDict()
        self._dirty: set[str] = set()
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._limit = _MAX_OPEN
        if allowed != resource.RLIM_INFINITY:
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
                    raise OutputError(
                        f"{path} cannot be opened: {error.strerror}. Raise the limit (ulimit -n), "
                        "or close what else is open."
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
        buffer: a buffer of bytes; ``array.data`` of a uint8 array, for example.

    Raises:
        CheckpointError: the file cannot be read, or ends too early.
    """
    with reading(path):
        descriptor, num_read = files[path], 0
        while num_read < len(buffer):
            count = os.preadv(descriptor, [buffer[num_read:]], offset + num_read)
            if count == 0:
                raise CheckpointError(
                    f"{path} ends at byte {offset + num_read}; expected {offset + len(buffer)}. It "
                    "was truncated after its header was read."
                )
            num_read += count


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


# Linux's call; ``os`` has only ``posix_fallocate``, which may emulate it. Other systems have none.
_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


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
