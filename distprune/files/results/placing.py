"""The place of a result: checks of destination and source, folders, permissions, removal."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from distprune.files.checkpoints.checkpoint import SourceFile
from distprune.files.disk.access import check_owner, sync_folder, writing
from distprune.files.disk.destination import (
    check_free_bytes,
    folder_bytes,
    partial_folders,
    resolve_destination,
)
from distprune.files.disk.locking import Lock
from distprune.files.errors import CheckpointError, OutputError
from distprune.files.formats.header import WeightFile
from distprune.files.reports.report import REPORT_FILE

DISCARD_HINT = "add --discard to that command to remove it"


def discard(destination: str | Path, *, take_over: bool = False) -> list[tuple[str, int]]:
    """Remove the unfinished results of a destination; the destination itself stays.

    Args:
        destination: of ``prune``, ``apply_masks`` or a conversion.
        take_over: see :meth:`Lock.acquire`.

    Returns:
        (path, bytes on the disk) of each folder that was removed.

    Raises:
        OutputError: a run is at work there, or a folder is a link or another user's.
    """
    target = resolve_destination(destination)
    if not target.parent.is_dir() or not (
        partial_folders(target) or os.path.lexists(f"{target}.partial.lock")
    ):
        return []
    lock = Lock(target)
    lock.acquire(take_over)
    try:
        folders = partial_folders(target)
        for folder in folders:
            check_own_folder(folder)
        removed = []
        for folder in folders:
            removed.append((str(folder), folder_bytes(folder)))
            with writing(folder):
                shutil.rmtree(folder)
        return removed
    finally:
        lock.release()


@contextlib.contextmanager
def new_folder(
    destination: Path, suffix: str, folders: Iterable[tuple[str, int]], num_bytes: int
) -> Iterator[Path]:
    """A folder beside the destination, which gets the destination's name when the context ends.

    Args:
        destination: absolute; must not exist.
        suffix: of the name of the unfinished folder.
        folders: as for :func:`make_folders`.
        num_bytes: that the disk needs.

    Raises:
        OutputError: the destination exists or is in use, or the disk is full. After any exception
            the unfinished folder is removed.
    """
    check_free(destination)
    lock = Lock(destination)
    lock.acquire()
    folder = destination.with_name(f"{destination.name}.partial-{suffix}")
    try:
        check_free(destination)
        if os.path.lexists(folder):  # of a run that was killed
            check_own_folder(folder)
            with writing(folder):
                shutil.rmtree(folder)
        try:
            with writing(folder):
                make_folders(folders, folder)
            check_free_bytes(folder, num_bytes, destination)
            yield folder
            lock.check()
            with writing(destination):
                for path, _, _ in os.walk(folder):
                    sync_folder(path)
                check_free(destination)
                os.rename(folder, destination)
                sync_folder(destination.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        lock.release()


def check_own_folder(path: Path) -> None:
    """Raise OutputError if a path is a link, not a folder, or belongs to another user."""
    if path.is_symlink() or not path.is_dir():
        problem = f"is a link to {os.readlink(path)!a}" if path.is_symlink() else "is not a folder"
        raise OutputError(
            f"{path} {problem}; expected a folder that distprune made. Nothing was written to it. "
            "Remove it, or choose another destination."
        )
    with writing(path):
        check_owner(path)


def check_free(destination: Path) -> None:
    """Raise OutputError if the destination exists."""
    if os.path.lexists(destination):
        is_done = (destination / REPORT_FILE).exists()
        state = "holds a finished result of distprune" if is_done else "exists"
        raise OutputError(
            f"{destination} {state}; expected a new name. Delete it, or choose another destination."
        )


def check_place(source: str, destination: Path) -> None:
    """Raise OutputError if the destination is inside the source, or its parent is not a folder."""
    target, root = Path(os.path.realpath(destination)), Path(os.path.realpath(source))
    if target == root or root in target.parents:
        raise OutputError(
            f"{destination} is inside the source {source}; expected a path outside of it."
        )
    if not destination.parent.is_dir():
        raise OutputError(f"{destination.parent} is not a folder; create it first.")


def check_unchanged(folder: str, files: Iterable[SourceFile]) -> None:
    """Raise CheckpointError if files of the source have changed since the source was opened.

    Args:
        folder: the source, for the message.
        files: of the source; their sizes and times are compared with those on the disk.
    """
    changed = []
    for file in files:
        try:
            info = os.stat(file.path)
        except OSError:
            changed.append(f"{file.name} is gone.")
            continue
        if (info.st_size, info.st_mtime_ns) != (file.size, file.mtime_ns):
            changed.append(f"{file.name} has changed.")
    if changed:
        raise CheckpointError(
            f"{folder} has changed since it was opened; expected a source that stays as it is:",
            changed,
        )


def make_folders(folders: Iterable[tuple[str, int]], folder: Path) -> None:
    """Make a folder and its subfolders with the permissions of the source's, less the umask.

    Existing folders stay as they are. The owner always has full access.

    Args:
        folders: (name, permissions), sorted, so that a folder precedes its subfolders; "" is
            ``folder`` itself.

    Raises:
        OSError: a folder cannot be made.
    """
    for name, mode in folders:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder / name, mode | 0o700)


def mask_mode(files: Iterable[WeightFile]) -> int:
    """Permissions of the mask file: those that all weight files have in common."""
    return functools.reduce(operator.and_, (file.mode for file in files), 0o666)


def top_mode(folders: Iterable[tuple[str, int]]) -> int:
    """Permissions of the result folder itself, less the umask.

    Args:
        folders: as for :func:`make_folders`.
    """
    umask = os.umask(0o077)
    os.umask(umask)
    return (dict(folders).get("", 0o777) & ~umask) | 0o700
