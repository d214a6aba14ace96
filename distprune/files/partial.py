"""The unfinished result folder, which one rename makes the destination.

    DST.partial.lock            held by the run that is at work
    DST.partial-<digest>/       all output files, in full size from the start
        distprune/work/         journals of finished units, and what was prepared for all units
        distprune/report.json   written last
    DST.partial-<digest>.work/  distprune/work, moved aside just before the last rename

Only the leader uses this module.

Nothing here follows a link: a link in the unfinished folder is an error. Until the last rename,
only the owner of the folder may write to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distprune.files.checkpoints.checkpoint import SIDECAR, SourceFile
from distprune.files.checkpoints.mask_files import MASK_FILE
from distprune.files.disk.access import (
    OutputFiles,
    allocate,
    sync_folder,
    write_atomically,
    writing,
)
from distprune.files.disk.destination import (
    Lock,
    check_free_bytes,
    folder_bytes,
    missing_bytes,
    partial_folders,
    resolve_destination,
)
from distprune.files.errors import CheckpointError, OutputError
from distprune.files.journals import (
    PREPARED_FILE,
    finished_units,
    next_run,
    usable,
)
from distprune.files.places import (
    check_free,
    check_own_folder,
    check_place,
    check_replaceable,
    has_replaced,
    put,
    remove_folder,
    settle,
    sync_folders,
)
from distprune.files.reports import REPORT_FILE, RUN_FILE
from distprune.files.text import format_size
from distprune.files.units import Task

RECIPE_FILE = f"{SIDECAR}/recipe.yaml"
_WORK = f"{SIDECAR}/work"


class Partial:
    """The unfinished result of a task.

    Args:
        task: to carry out.
        destination: absolute.

    Attributes:
        destination: what it becomes.
        folder: of the unfinished result.
        work: the folder of journals in it.
        lock: acquired by :meth:`start`.
        is_open: whether the folder was checked and belongs to this task.
    """

    def __init__(self, task: Task, destination: Path) -> None:
        self._task = task
        self.destination = destination
        self.folder = destination.with_name(f"{destination.name}.partial-{task.digest[:16]}")
        self.work = self.folder / _WORK
        self.lock = Lock(destination)
        self._aside = self.folder.with_name(self.folder.name + ".work")
        self._texts: list[str] = []
        self.is_open = False

    def start(self) -> dict[str, Any]:
        """Acquire the lock, make all files or find them, and read what earlier runs finished.

        Returns:
            A value of JSON. ``finished``: the texts of the report and of its run if the destination
            is the result of this task, else None. In the latter case also ``run``, a number for the
            journals, and from :func:`~distprune.files.journals.usable` ``prepared`` and ``units``.

        Raises:
            OutputError: the destination exists or is in use, the unfinished result of another task
                or a foreign file is in its place, or the disk has too few free bytes.
        """
        check_place(self._task.checkpoint.root, self.destination)
        finished = self._find_finished()
        if finished is not None:
            self._remove_remains()
            return {"finished": finished}
        self._check_taken()
        self.lock.acquire()
        settle(self.destination)
        self._check_taken()
        self._check_others()
        self._open_folder()
        prepared, units = usable(self._task, self.work)
        self._allocate()
        run = next_run(self.work)
        return {"finished": None, "run": run, "units": units, "prepared": prepared}

    def complete(
        self,
        recipe: bytes,
        run: bytes,
        report: bytes,
        others: Mapping[str, bytes | Iterable[bytes]] | None = None,
    ) -> None:
        """Write the small files; after this, only :meth:`publish` remains.

        Args:
            recipe, run, report: contents of the files beside the masks.
            others: contents of the files in ``Task.written_last``, by name, or parts of them.

        Raises:
            CheckpointError: the source has changed since it was opened.
            OutputError: a file cannot be written.
        """
        check_unchanged(self._task.checkpoint.folder, self._task.checkpoint.all_files)
        for name, data in (others or {}).items():
            write_atomically(self.folder / name, data)
        write_atomically(self.folder / RECIPE_FILE, recipe)
        write_atomically(self.folder / RUN_FILE, run)
        sync_folders(self.folder)
        write_atomically(self.folder / REPORT_FILE, report)
        self._texts = [report.decode(), run.decode()]

    def publish(self) -> list[str]:
        """Rename the folder to the destination.

        Returns:
            The texts of the report and of its run.

        Raises:
            OutputError: the destination exists by now, or the folder cannot be written.
        """
        self._check_taken()
        umask = os.umask(0o077)
        os.umask(umask)
        mode = dict(self._task.checkpoint.folders).get("", 0o777) & ~umask
        with writing(self.destination):
            remove_folder(self._aside)
            os.rename(self.work, self._aside)
            sync_folder(self.folder / SIDECAR)
            # Until now only its owner had access; from now on, the permissions of the source.
            os.chmod(self.folder, mode | 0o700)
        put(self.folder, self.destination, replaces=self._task.replaces)
        shutil.rmtree(self._aside, ignore_errors=True)
        return self._texts

    def discard(self, *, only_if_empty: bool = False) -> None:
        """Remove the folder.

        Args:
            only_if_empty: keep it if a unit is finished or something was prepared.
        """
        is_kept = only_if_empty and (self._finished() or (self.work / PREPARED_FILE).exists())
        if self.is_open and not is_kept:
            shutil.rmtree(self.folder, ignore_errors=True)

    def left(self) -> str:
        """A sentence on what is on the disk after a stop, and what to do with it."""
        if not self.folder.is_dir():
            return "Nothing was left on the disk."
        num_bytes = sum(self._task.units[number].num_bytes for number in self._finished())
        return (
            f"{self.folder} keeps the finished part, "
            f"{format_size(num_bytes)} of "
            f"{format_size(self._task.num_bytes)}, and takes "
            f"{format_size(folder_bytes(self.folder))} of the disk: run the same command again to "
            f"resume, or {DISCARD_HINT}."
        )

    def _finished(self) -> Iterable[int]:
        """The numbers of the finished units; none if the journals cannot be read."""
        with contextlib.suppress(OSError):
            return finished_units(self._task, self.work)
        return ()

    def _find_finished(self) -> list[str] | None:
        """The texts of the report and of its run if the destination is this task's result."""
        try:
            texts = [(self.destination / name).read_text() for name in (REPORT_FILE, RUN_FILE)]
            report, _ = map(json.loads, texts)
            is_ours = (report["status"], report["digest"]) == ("complete", self._task.digest)
            sizes = self._task.sizes
            actual = {name: os.stat(self.destination / name).st_size for name in sizes}
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return None
        return texts if is_ours and actual == sizes else None

    def _remove_remains(self) -> None:
        """Remove the lock and journals of a run that was killed just after the last rename."""
        remains = os.path.lexists(self._aside) or has_replaced(self.destination)
        if os.path.lexists(self.lock.path) or remains:
            with contextlib.suppress(OutputError):
                self.lock.acquire()
                remove_folder(self._aside)
                settle(self.destination)

    def _check_taken(self) -> None:
        """Raise OutputError if the destination exists, and may not be replaced."""
        if self._task.replaces:
            files = [file.path for file in self._task.checkpoint.all_files]
            check_replaceable(self.destination, [*files, *self._task.inputs])
        else:
            check_free(self.destination, is_replaceable=True)

    def _check_others(self) -> None:
        # What a pruning with text keeps is of this destination, whatever its plan is.
        own = (self.folder.name, self._aside.name)
        others = [
            path
            for path in partial_folders(self.destination)
            if path.name not in own
            and not path.name.startswith(f"{self.destination.name}.partial-text")
        ]
        if others:
            raise OutputError(
                f"{others[0]} is the unfinished result of another recipe or source, or the source "
                "has changed since. Finish it with the command that began it, "
                f"{DISCARD_HINT}, or choose another destination."
            )

    def _open_folder(self) -> None:
        """Make the folder, or check the existing one."""
        for path in (self.folder, self._aside):
            if os.path.lexists(path):
                check_own_folder(path)
        with writing(self.folder):
            if not self.folder.exists():
                self.folder.mkdir(mode=0o700)
            if self._aside.exists():
                if self.work.exists():  # then the one aside is of an earlier run
                    remove_folder(self._aside)
                else:  # killed, or failed, just before the last rename
                    os.rename(self._aside, self.work)
            os.chmod(self.folder, 0o700)
        for inner, folders, names in os.walk(self.folder):
            for name in (*folders, *names):
                if os.path.islink(os.path.join(inner, name)):
                    raise OutputError(f"{inner}/{name} is a link; remove it, or {DISCARD_HINT}.")
        self.is_open = True
        with writing(self.folder):
            make_folders(self._task.checkpoint.folders, self.folder)
            self.work.mkdir(parents=True, exist_ok=True)

    def _allocate(self) -> None:
        sizes = self._task.sizes
        num_needed = sum(missing_bytes(self.folder / name, size) for name, size in sizes.items())
        check_free_bytes(self.folder, num_needed, self.destination)
        for name, (size, mode) in self._task.files.items():
            path = self.folder / name
            with writing(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
            allocate(str(path), size, mode)
        layout = self._task.layout
        if layout is not None:
            with contextlib.closing(OutputFiles()) as files:
                files.write(str(self.folder / MASK_FILE), 0, layout.header)
                files.sync()


DISCARD_HINT = "add --discard to that command to remove it"


def discard(destination: str | Path) -> list[tuple[str, int]]:
    """Remove the unfinished results of a destination; the destination itself stays.

    Args:
        destination: of ``prune`` or ``apply_masks``.

    Returns:
        (path, bytes on the disk) of each folder that was removed.

    Raises:
        OutputError: a run is at work there, or a folder is a link.
    """
    target = resolve_destination(destination)
    if not target.parent.is_dir() or not (
        partial_folders(target) or os.path.lexists(f"{target}.partial.lock") or has_replaced(target)
    ):
        return []
    lock = Lock(target)
    lock.acquire()
    try:
        settle(target)
        folders = partial_folders(target)
        for folder in folders:
            check_own_folder(folder)
        removed = [(str(folder), folder_bytes(folder)) for folder in folders]
        for folder in folders:
            remove_folder(folder)
        return removed
    finally:
        lock.release()


@contextlib.contextmanager
def new_folder(
    destination: Path, folders: Iterable[tuple[str, int]], num_bytes: int
) -> Iterator[Path]:
    """A folder beside the destination, which gets the destination's name when the context ends.

    Args:
        destination: absolute; must not exist.
        folders: as for :func:`make_folders`.
        num_bytes: that the disk needs.

    Raises:
        OutputError: the destination exists or is in use, or the disk is full. After any exception
            the unfinished folder is removed.
    """
    check_free(destination)
    lock = Lock(destination)
    lock.acquire()
    folder = destination.with_name(f"{destination.name}.partial-save")
    try:
        check_free(destination)
        remove_folder(folder)  # of a run that was killed
        try:
            with writing(folder):
                make_folders(folders, folder)
            check_free_bytes(folder, num_bytes, destination)
            yield folder
            sync_folders(folder)
            check_free(destination)
            put(folder, destination, replaces=False)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        lock.release()


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
