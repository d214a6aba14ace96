"""Reading and writing files at offsets: no memory maps, nothing shorter than asked for.

[Note: no mmap] A mapped file that is truncated, or a hole on a full disk, kills the process
with SIGBUS, and mapped pages count as its memory. preadv and pwrite return errors.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import secrets
import stat
import sys
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from distprune.files.errors import CheckpointError, OutputError

# How files of the output are opened: a link in their place is an error, and is not followed.
WRITE = os.O_RDWR | os.O_NOFOLLOW
_MAX_OPEN = 64
# Of the files that a process may open: for whatever else it has open, and how many OpenFiles
# there may be at once.
_RESERVED, _SHARES = 32, 4
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NEW = ".new"  # ends the name of a small file while it is written
# Of fallocate; a sandbox that does not know the call answers EPERM.
_NOT_ALLOCATED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENODEV}


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
        self._checksums: dict[str, int] = {}

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

    def written(self, path: str, data: memoryview | bytes = b"") -> None:
        """Note that a file has to be synced, and add what was written to its checksum."""
        self._dirty.add(path)
        self._checksums[path] = zlib.crc32(data, self._checksums.get(path, 0))

    def take_checksums(self) -> dict[str, int]:
        """By path, the crc32 of all data since the last call, in the order of writing."""
        taken, self._checksums = self._checksums, {}
        return taken

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
    files.written(path, view)
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
                to = outputs[output]
            try:
                size = os.copy_file_range(sources[source], to, size, start, start)
            except OSError as error:
                if error.errno in _FULL:
                    raise _unwritable(output, error) from error
                # It is not supported here, or fails: reading and writing tell which file it is.
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

    [Note: no emulation] Where a file system cannot reserve blocks, ``posix_fallocate`` of glibc
    reads and writes a byte of every block: for hours, over a network. The call of the system only
    says that it cannot, and then the file has a hole, and a full disk is noticed when it is filled.

    Args:
        mode: permissions of a new file, less the umask; its owner may always read and write it.

    Raises:
        OutputError: there is not enough room, or the path is no file of its own: it is a link,
            has another hard link, or is no regular file.
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
                    if error.errno not in _NOT_ALLOCATED:
                        raise
        finally:
            os.close(descriptor)


def check_own_file(file: int | str, path: str | Path) -> None:
    """Raise OutputError if a file is not a regular one with a single name.

    Args:
        file: a descriptor, or a path; a link is not followed.
        path: for the message.
    """
    info = os.stat(file, follow_symlinks=isinstance(file, int))
    if stat.S_ISLNK(info.st_mode):
        found = f"is a link to {os.readlink(path)!a}"
    elif not stat.S_ISREG(info.st_mode):
        found = "is not a regular file"
    elif info.st_nlink > 1:
        found = f"has {info.st_nlink} hard links"
    else:
        return
    raise OutputError(
        f"{path} {found}; expected a file that distprune made and that has no other name. Nothing "
        "was written to it. Remove it, or choose another destination."
    )


def check_owner(path: str | Path) -> None:
    """Raise OutputError if a file or folder belongs to another user.

    Some file systems show all files as those of one user, whoever made them; so a file is made
    beside it to see whose files are those of this process.
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


def _load_fallocate() -> ctypes._CFuncPtr | None:
    """The system's call; os has only ``posix_fallocate``, which may emulate."""
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
        OSError: as the system says; ENOSYS where it has no such call.
    """
    if _fallocate is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while _fallocate(descriptor, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write a small file so that it is there in full, or as it was before.

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
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(new, path)
        sync_folder(os.path.dirname(path))


def read_small(path: str | Path) -> bytes:
    """All of a regular file.

    Raises:
        OSError: it cannot be read, is a link, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        return file.read()


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data where the descriptor is."""
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
def writing(path: str | Path) -> Iterator[None]:
    """Turn a failure to write into an OutputError that says what to do.

    Raises:
        OutputError: in place of any OSError.
    """
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: str | Path, error: OSError) -> OutputError:
    hint = ""
    if error.errno in _FULL:
        hint = " Make room and run the same command again."
    elif error.errno == errno.ELOOP:
        hint = " It is a link, which is not followed. Remove it, or choose another destination."
    return OutputError(f"{path} cannot be written: {error.strerror}.{hint}")
