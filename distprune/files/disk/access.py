"""Small files, folders and ownership: safe ways to write, to read and to check them."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from distprune.files.errors import OutputError

# How output files are opened: a link in their place is an error and is not followed.
WRITE = os.O_RDWR | os.O_NOFOLLOW
NEW = ".new"  # the suffix of a small file while it is written
DISK_IS_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_atomically(path: str | Path, data: bytes | Iterable[bytes]) -> None:
    """Write a small file; after a crash it has either all of the new content or the old one.

    Args:
        path: of the file.
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
