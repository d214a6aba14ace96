"""Files: new ones, which get their names when they are complete, and bytes at offsets.

[Note: no mmap] If a mapped file is truncated, or a hole in it meets a full disk, SIGBUS kills the
process; mapped pages also count as its memory. ``preadv`` and ``write`` return errors instead.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from distprune.files.errors import CheckpointError, OutputError

# Bytes of a slab: what is computed from one stays in the caches. A longer block is a slab itself.
SLAB_BYTES = 1 << 20


def slabs(size: int, itemsize: int = 1, block: int = 1) -> Iterator[range]:
    """The elements of a tensor in runs of about :data:`SLAB_BYTES`, which are whole blocks.

    Args:
        size: elements of the tensor, a multiple of ``block``.
        itemsize: bytes of an element.
        block: elements of a run that is not divided.
    """
    step = max(SLAB_BYTES // (itemsize * max(block, 1)), 1) * max(block, 1)
    for start in range(0, size, step):
        yield range(start, min(start + step, size))


@contextlib.contextmanager
def new_file(path: str | Path, mode: int = 0o666) -> Iterator[int]:
    """A file that gets its name when all of its bytes are on the disk.

    Args:
        path: the path of the file; one that is there is replaced at the end.
        mode: permissions, less the umask; its owner may always read and write it.

    Yields:
        A descriptor of ``path.part``, which is empty at first; it is removed after an exception.

    Raises:
        OutputError: it cannot be written.
    """
    part = f"{os.path.abspath(path)}.part"
    with writing(path):
        os.makedirs(os.path.dirname(part), exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        descriptor = os.open(part, flags, mode | 0o600)
    try:
        with writing(path):
            try:
                yield descriptor
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(part, path)
            sync_folder(os.path.dirname(part))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def write_atomically(path: str | Path, data: bytes | Iterable[bytes]) -> None:
    """Write a small file; after a crash it has either all of the new content or the old one.

    Args:
        path: the path of the file.
        data: its content, or parts of it in order.

    Raises:
        OutputError: it cannot be written.
    """
    with new_file(path) as descriptor:
        for part in [data] if isinstance(data, bytes) else data:
            write_all(descriptor, part)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of the data at the descriptor's position."""
    view = memoryview(data).cast("B")
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


def copy_range(source: str, start: int, stop: int, output: int) -> Iterator[int]:
    """Append the bytes [start, stop) of a file to another one; yields sizes of pieces.

    Args:
        source: the path of a file.
        output: the descriptor of the other one, at whose position they are written.

    Raises:
        CheckpointError: the source cannot be read, or ends too early.
        OSError: the output cannot be written.
    """
    for slab in slabs(stop - start):
        data = memoryview(bytearray(len(slab)))
        read_into(source, start + slab.start, data)
        write_all(output, data)
        yield len(data)
