"""Bytes at offsets; new files, and a new folder, which get their names when they are complete.

    DST.partial.lock          held with ``flock`` by the run that is at work
    DST.partial/              the unfinished result; one rename makes it DST
        a.safetensors           finished: it gets its name when all its bytes are on the disk
        b.safetensors.part      was being written when a run was killed; it is begun again
        distprune/work/         the digest of the plan, and what later runs need of finished files
    DST.partial-replaced/     the result that was at DST, for the moment of the rename

Only the first rank changes folders.

[Note: no mmap] If a mapped file is truncated, or a hole in it meets a full disk, SIGBUS kills the
process; mapped pages also count as its memory. ``preadv`` and ``write`` return errors instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from distprune.files.errors import CheckpointError, OutputError, printable

SIDECAR = "distprune"  # the folder, inside a result, of masks and report
REPORT_FILE = f"{SIDECAR}/report.json"
WORK = f"{SIDECAR}/work"  # the folder, inside an unfinished result, of what later runs need
DISCARD_HINT = "add --discard to that command to remove it"
# Bytes of a slab: what is computed from one stays in the caches. A longer block is a slab itself.
SLAB_BYTES = 1 << 20


def slabs(size: int, itemsize: int = 1, block: int = 1) -> Iterator[range]:
    """The elements of a tensor in runs of about :data:`SLAB_BYTES`, which are whole blocks.

    Each begins at a multiple of 8, so that its mask is whole bytes.

    Args:
        size: elements of the tensor, a multiple of ``block``.
        itemsize: bytes of an element.
        block: elements of a run that is not divided.
    """
    block = max(block, 1) * (1 if block % 8 == 0 else 8)
    step = max(SLAB_BYTES // (itemsize * block), 1) * block
    for start in range(0, size, step):
        yield range(start, min(start + step, size))


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn any OSError into a CheckpointError, whose cause it is."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise CheckpointError(f"{where} cannot be read: {error.strerror}.") from error


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn any OSError into an OutputError, whose cause it is."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}.") from error


def read_into(path: str, parts: Iterable[tuple[int, memoryview]]) -> None:
    """Fill buffers with bytes of a file.

    Args:
        path: of the file.
        parts: (the offset in the file, a buffer such as ``array.data`` of uint8) of each.

    Raises:
        CheckpointError: the file cannot be read, or ends too early.
    """
    with reading(path), open(path, "rb", buffering=0) as file:
        for offset, buffer in parts:
            num_read = 0
            while num_read < len(buffer):
                count = os.preadv(file.fileno(), [buffer[num_read:]], offset + num_read)
                if count == 0:
                    raise CheckpointError(
                        f"{path} ends at byte {offset + num_read}; expected "
                        f"{offset + len(buffer)}. It was truncated after its header was read."
                    )
                num_read += count


def pieces_of(path: str, start: int, stop: int, block: int = 1) -> Iterator[bytearray]:
    """The bytes [start, stop) of a file, in slabs of whole blocks; raises as :func:`read_into`."""
    for slab in slabs(stop - start, block=block):
        raw = bytearray(len(slab))
        read_into(path, [(start + slab.start, memoryview(raw))])
        yield raw


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


def write_all(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of the data at the descriptor's position."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write a small file; after a crash it has either all of the new content or the old one.

    Args:
        path: the path of the file.
        data: its content.

    Raises:
        OutputError: it cannot be written.
    """
    with new_file(path) as descriptor:
        write_all(descriptor, data)


def sync_folder(path: str | Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the file system of a folder."""
    return shutil.disk_usage(folder).free


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


def folder_bytes(folder: Path) -> int:
    """Bytes of the files of a folder; 0 if there is none."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def resolve_destination(destination: str | Path, source: str | Path) -> Path:
    """The absolute path of a result.

    Raises:
        OutputError: it has no name (as ``/``), its parent is not a folder, or it is inside of the
            source.
    """
    path, root = Path(os.path.abspath(destination)), Path(os.path.realpath(source))
    if not (path.name and path.parent.is_dir()):
        folder = printable(str(path.parent))
        raise OutputError(f"{folder} is not a folder in which {path.name!a} can be made.")
    real = Path(os.path.realpath(path))
    if real == root or root in real.parents:
        raise OutputError(f"{path} is inside the source {source}; expected a path outside of it.")
    return path


@contextlib.contextmanager
def locked(destination: Path) -> Iterator[None]:
    """Be the only run that works on a destination, until the context or the process ends.

    If a run was killed between the two renames that replace a result, the old one goes back. A file
    system without ``flock`` locks nothing.

    Raises:
        OutputError: another run is at work there, or the lock file cannot be written.
    """
    path = f"{destination}.partial.lock"
    with writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last owner may have removed the file meanwhile.
            is_free = os.path.samestat(os.fstat(descriptor), os.stat(path))
        except OSError as error:
            is_free = not isinstance(error, (BlockingIOError, FileNotFoundError))
        if not is_free:
            raise OutputError(
                f"another process is at work on {destination}: it holds {path}. Wait for it, or "
                "end it."
            )
        try:
            old = _replaced(destination)
            with writing(destination):
                if old.exists() and not destination.exists():
                    os.rename(old, destination)
                shutil.rmtree(old, ignore_errors=True)
            yield
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
    finally:
        os.close(descriptor)


def finished_report(destination: Path) -> dict[str, Any] | None:
    """The report of a finished result; None if the destination is something else."""
    try:
        report: dict[str, Any] = json.loads((destination / REPORT_FILE).read_text())
        return report if report["status"] == "complete" and report["digest"] else None
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def check_destination(
    destination: Path, inputs: Iterable[str | Path], *, replaces: bool = False
) -> None:
    """Raise OutputError if something is at a destination that is not to be replaced.

    Args:
        destination: absolute.
        inputs: files that the result is made from; none may be in one that it replaces.
        replaces: whether a finished result is to be replaced. Nothing else is.
    """
    if not os.path.lexists(destination):
        return
    if finished_report(destination) is None or destination.is_symlink():
        raise OutputError(
            f"{destination} exists, and is no finished result of distprune, which --force could "
            "replace; expected a new name. Delete it, or choose another destination."
        )
    if not replaces:
        raise OutputError(
            f"{destination} holds a finished result of distprune; expected a new name. Add --force "
            "to replace it, or choose another destination."
        )
    target = Path(os.path.realpath(destination))
    for path in inputs:
        if target in Path(os.path.realpath(path)).parents:
            raise OutputError(
                f"{path} is in {destination}, which --force would replace; expected inputs "
                "outside of it. Choose another destination."
            )


def begin(destination: Path, digest: str, num_bytes: int) -> Path:
    """Make the folder of an unfinished result, or go on with the one that is there.

    Args:
        destination: absolute.
        digest: of everything that decides the result.
        num_bytes: of all its files.

    Raises:
        OutputError: the folder is that of another result, it cannot be written, or the disk has too
            few free bytes.
    """
    folder = partial_folder(destination)
    path = folder / WORK / "digest"
    if path.exists() and path.read_text() != digest:
        raise OutputError(
            f"{folder} is the unfinished result of another recipe or source, or the source has "
            f"changed since. Finish it with the command that began it, {DISCARD_HINT}, or choose "
            "another destination."
        )
    is_new = not path.exists()
    if is_new:
        shutil.rmtree(folder, ignore_errors=True)
    check_free_bytes(destination.parent, num_bytes - folder_bytes(folder), destination)
    if is_new:
        try:
            write_atomically(path, digest.encode())
        except OutputError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return folder


def publish(destination: Path) -> None:
    """Rename the folder of a complete result, which takes the place of the one that is there."""
    folder, old = partial_folder(destination), _replaced(destination)
    with writing(destination):
        for inner, _, _ in os.walk(folder):
            sync_folder(inner)
        if destination.exists():
            os.rename(destination, old)
        try:
            os.rename(folder, destination)
        except OSError:
            if old.exists():
                os.rename(old, destination)
            raise
        sync_folder(destination.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def new_folder(destination: Path, num_bytes: int) -> Iterator[Path]:
    """A folder that gets the destination's name when the context ends.

    Args:
        destination: absolute; must not exist.
        num_bytes: that the disk needs.

    Raises:
        OutputError: the destination exists or is in use, or the disk is full. After any exception
            the unfinished folder is removed.
    """
    with locked(destination):
        check_destination(destination, ())
        folder = begin(destination, "", num_bytes)
        try:
            shutil.rmtree(folder)  # of a run that was killed
            folder.mkdir()
            yield folder
            check_destination(destination, ())
            publish(destination)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def partial_folders(destination: Path) -> list[Path]:
    """The folders of unfinished results of a destination, whichever command made them."""
    of_text = r"(\.partial-text-[0-9]+)?"
    pattern = re.compile(re.escape(destination.name) + of_text + r"\.partial(-text(-[0-9]+)?)?")
    with writing(destination.parent):
        names = sorted(os.listdir(destination.parent))
    return [destination.with_name(name) for name in names if pattern.fullmatch(name)]


def discard(destination: Path) -> list[Path]:
    """Remove the unfinished results of a destination, and return their paths; it stays itself.

    Raises:
        OutputError: a run is at work there, or a folder cannot be removed.
    """
    target = destination.absolute()
    with locked(target):
        folders = partial_folders(target)
        for folder in folders:
            with writing(folder):
                shutil.rmtree(folder)
    return folders


def partial_folder(destination: Path) -> Path:
    """The folder of an unfinished result."""
    return destination.with_name(f"{destination.name}.partial")


def _replaced(destination: Path) -> Path:
    return destination.with_name(f"{destination.name}.partial-replaced")
