"""Reserving the blocks of output files, so that a full disk is noticed before the work begins."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable

from distprune.files.disk.access import WRITE, check_own_file, writing

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
