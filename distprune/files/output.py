"""The folder of an unfinished result, which one rename makes the destination.

    DST.partial.lock          held with ``flock`` by the run that is at work
    DST.partial/              files of the result
        a.safetensors           finished: it gets its name when all its bytes are on the disk
        b.safetensors.part      was being written when a run was killed; it is begun again
        distprune/work/         the digest of the task, and the masks and counts of each weight file
    DST.partial-replaced/     the result that was at DST, while it is replaced

Only the first rank changes folders.
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

from distprune.files.checkpoint import SIDECAR, Checkpoint
from distprune.files.disk import sync_folder, write_atomically, writing
from distprune.files.errors import OutputError
from distprune.files.text import printable

DISCARD_HINT = "add --discard to that command to remove it"
WORK = f"{SIDECAR}/work"  # the folder, inside an unfinished result, of what later runs need
REPORT_FILE = f"{SIDECAR}/report.json"


def resolve_destination(destination: str | Path) -> Path:
    """The absolute path of a result.

    Raises:
        OutputError: it has no name (as ``/``), or its parent is not a folder.
    """
    path = Path(os.path.abspath(destination))
    if not path.name:
        raise OutputError(f"{path} has no name; expected that of a new folder.")
    if not path.parent.is_dir():
        raise OutputError(f"{printable(str(path.parent))} is not a folder; create it first.")
    return path


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the file system of a folder."""
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


def folder_bytes(folder: Path) -> int:
    """Bytes of the files of a folder; files that cannot be read count as 0."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


@contextlib.contextmanager
def locked(destination: Path) -> Iterator[None]:
    """Be the only run that works on a destination, until the context or the process ends.

    What a run has left that was killed while it replaced a result is put in order: the old result
    goes back, or away if the new one is in its place. A file system without ``flock`` locks
    nothing.

    Raises:
        OutputError: another run is at work there, or the lock file cannot be written.
    """
    path = f"{destination}.partial.lock"
    with writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        is_free = True
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its last owner may have removed the file meanwhile.
                is_free = os.path.samestat(os.fstat(descriptor), os.stat(path))
            except (BlockingIOError, FileNotFoundError):
                is_free = False
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


def partial_folders(destination: Path) -> list[Path]:
    """The folders of unfinished results of a destination, whichever command made them."""
    of_text = r"(\.partial-text-[0-9]+)?"
    pattern = re.compile(
        re.escape(destination.name) + of_text + r"\.partial(-save|-text(-[0-9]+)?)?"
    )
    with writing(destination.parent):
        names = sorted(os.listdir(destination.parent))
    return [destination.with_name(name) for name in names if pattern.fullmatch(name)]


def discard(destination: str | Path) -> list[tuple[str, int]]:
    """Remove the unfinished results of a destination; the destination itself stays.

    Returns:
        (path, bytes) of each folder that was removed.

    Raises:
        OutputError: a run is at work there, or a folder cannot be removed.
    """
    target = resolve_destination(destination)
    if not partial_folders(target) and not _replaced(target).exists():
        return []
    with locked(target):
        removed = [(str(folder), folder_bytes(folder)) for folder in partial_folders(target)]
        for folder, _ in removed:
            with writing(folder):
                shutil.rmtree(folder)
    return removed


def check_outside(destination: Path, source: Checkpoint) -> None:
    """Raise OutputError if the destination is inside the source."""
    target, root = Path(os.path.realpath(destination)), Path(os.path.realpath(source.root))
    if target == root or root in target.parents:
        raise OutputError(
            f"{destination} is inside the source {source.root}; expected a path outside of it."
        )


def check_destination(
    destination: Path,
    source: Checkpoint,
    *,
    replaces: bool | None = False,
    inputs: Iterable[str | Path] = (),
) -> None:
    """Raise OutputError if a result cannot be made here.

    Args:
        destination: absolute.
        source: what the result is made from; no result may be inside it.
        replaces: whether a finished result is to be replaced; None: the command cannot do that.
        inputs: more files that the new result is made from; none may be in the old one.
    """
    check_outside(destination, source)
    if not os.path.lexists(destination):
        return
    is_result = finished_report(destination) is not None and not destination.is_symlink()
    way = "Delete it, or choose another destination."
    if not replaces:
        state = "holds a finished result of distprune" if is_result else "exists"
        if is_result and replaces is not None:
            way = "Add --force to replace it, or choose another destination."
        raise OutputError(f"{destination} {state}; expected a new name. {way}")
    if not is_result:
        raise OutputError(
            f"{destination} is no finished result of distprune; --force replaces nothing else. "
            f"{way}"
        )
    target = Path(os.path.realpath(destination))
    for path in [*(file.path for file in source.all_files), *inputs]:
        if target in Path(os.path.realpath(path)).parents:
            raise OutputError(
                f"{path} is in {destination}, which --force would replace; expected inputs "
                "outside of it. Choose another destination."
            )


def finished_report(destination: Path) -> dict[str, Any] | None:
    """The report of a finished result; None if the destination is something else."""
    try:
        report: dict[str, Any] = json.loads((destination / REPORT_FILE).read_text())
        return report if report["status"] == "complete" and report["digest"] else None
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def _replaced(destination: Path) -> Path:
    return destination.with_name(f"{destination.name}.partial-replaced")


def publish(folder: Path, destination: Path, *, replaces: bool = False) -> None:
    """Rename a complete result to the destination.

    Args:
        replaces: whether it takes the place of the result that is there, if one is.
    """
    old = _replaced(destination)
    with writing(destination):
        for inner, _, _ in os.walk(folder):
            sync_folder(inner)
        if replaces and destination.exists():
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
def new_folder(destination: Path, source: Checkpoint, num_bytes: int) -> Iterator[Path]:
    """A folder that gets the destination's name when the context ends.

    Args:
        destination: absolute; must not exist.
        source: what the result is made from.
        num_bytes: that the disk needs.

    Raises:
        OutputError: the destination exists or is in use, or the disk is full. After any exception
            the unfinished folder is removed.
    """
    folder = destination.with_name(f"{destination.name}.partial-save")
    check_outside(destination, source)
    with locked(destination):
        check_destination(destination, source, replaces=None)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        try:
            with writing(folder):
                folder.mkdir()
            check_free_bytes(folder, num_bytes, destination)
            yield folder
            check_destination(destination, source, replaces=None)
            publish(folder, destination)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def has_files(folder: Path) -> bool:
    """Whether an unfinished result has files that a later run can use."""
    work = folder / WORK
    return any(work.glob("*.json")) or any(path.is_file() for path in folder.glob("*"))


def begin(folder: Path, digest: str) -> None:
    """Make the folder of an unfinished result, or go on with the one that is there.

    Args:
        folder: of the result.
        digest: of everything that decides the result.

    Raises:
        OutputError: it is the unfinished result of another task, or cannot be written.
    """
    path = folder / WORK / "digest"
    if not has_files(folder) or not path.exists():
        shutil.rmtree(folder, ignore_errors=True)
        write_atomically(path, digest.encode())
    elif path.read_text() != digest:
        raise OutputError(
            f"{folder} is the unfinished result of another recipe or source, or the source has "
            f"changed since. Finish it with the command that began it, {DISCARD_HINT}, or choose "
            "another destination."
        )
