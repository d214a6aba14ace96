"""The folder in which a result grows until one rename makes it the destination.

    DST.partial.lock            names the run that is at work
    DST.partial-<digest>/       all output files, in full size from the start
        distprune/work/         which units are done, and what was prepared for them
        distprune/report.json   written last
    DST.partial-<digest>.work/  distprune/work, for the moment before the last rename

Only the leader calls what is here.

[Note: links] Nothing here follows a link. A file or folder in the place of an output that is a
link, has another hard link, is not regular, or belongs to another user is an error, and so is
a file in the folder that no run writes: it would be published. The folder is its owner's alone
until it is the destination, so that nobody else can put anything there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distprune.files.checkpoints.checkpoint import SIDECAR
from distprune.files.checkpoints.mask_files import MASK_FILE
from distprune.files.disk.access import (
    NEW,
    WRITE,
    check_own_file,
    read_small,
    sync_folder,
    write_atomically,
    writing,
)
from distprune.files.disk.allocation import allocate
from distprune.files.disk.destination import partial_folders
from distprune.files.disk.journal import is_journal, next_run, read_records, sealed, unsealed
from distprune.files.disk.locking import Lock
from distprune.files.disk.open_files import OpenFiles, write_from
from distprune.files.disk.space import check_free_bytes, folder_bytes, missing_bytes
from distprune.files.errors import OutputError, format_size
from distprune.files.reports.report import REPORT_FILE, RUN_FILE
from distprune.files.results.permissions import make_folders, top_mode
from distprune.files.results.placing import (
    DISCARD_HINT,
    check_free,
    check_own_folder,
    check_place,
    check_unchanged,
)
from distprune.files.results.task import Task

RECIPE_FILE = f"{SIDECAR}/recipe.yaml"
_WORK = f"{SIDECAR}/work"
_PREPARED = "decision.json"


class Partial:
    """The unfinished result of a task.

    Args:
        task: what to do.
        destination: absolute.

    Attributes:
        folder: where the result grows.
        work: the folder of journals in it.
        lock: held from :meth:`start` on.
        is_open: whether the folder is known to be this task's.
    """

    def __init__(self, task: Task, destination: Path) -> None:
        self._task = task
        self._destination = destination
        self.folder = destination.with_name(f"{destination.name}.partial-{task.digest[:16]}")
        self.work = self.folder / _WORK
        self.lock = Lock(destination)
        self._aside = self.folder.with_name(self.folder.name + ".work")
        self._texts: list[str] = []
        self.is_open = False

    def start(self, take_over: bool) -> dict[str, Any]:
        """Take the lock, make all files or find them; what is done already, as JSON.

        Returns:
            ``finished``: the texts of the report and of its run if this very task has made the
            destination; None if there is something to do, and then ``run``, a number for the
            journals; ``done``, number and checksums of units whose files are there; ``num_lost``,
            units whose files are not; ``prepared``, as it was given to :meth:`write_prepared`.

        Raises:
            OutputError: the destination exists or is in use, another task is half done there,
                something is in the way, or there is not enough room.
        """
        check_place(self._task.checkpoint.root, self._destination)
        finished = self._find_finished()
        if finished is not None:
            self._remove_remains()
            return {"finished": finished}
        check_free(self._destination)
        self.lock.acquire(take_over)
        check_free(self._destination)
        self._check_others()
        self._open_folder()
        prepared, done, num_lost = self._find_done()
        self._allocate()
        return {
            "finished": None,
            "run": next_run(self.work),
            "done": done,
            "num_lost": num_lost,
            "prepared": prepared,
        }

    def write_prepared(self, value: Any) -> None:
        """Keep what all units need, for the next run."""
        line = sealed(value, self._task.digest) + "\n"
        write_atomically(self.work / _PREPARED, line.encode())

    def records(self) -> list[dict[str, Any]]:
        """Of all units, in order.

        Raises:
            OutputError: some are missing, though all were done.
        """
        found = read_records(self.work, self._task.digest)
        missing = [unit for unit in range(len(self._task.units)) if unit not in found]
        if missing:
            raise OutputError(
                f"{self.work} has no record of {len(missing)} of {len(self._task.units)} units, "
                f"such as unit {missing[0]}, which this run has done or found done; it was changed "
                "during the run. Run the same command again: it does what is missing."
            )
        return [found[unit] for unit in range(len(self._task.units))]

    def complete(
        self, recipe: bytes, run: bytes, report: bytes, others: Mapping[str, bytes] | None = None
    ) -> None:
        """Write what belongs beside the masks: from here on only :meth:`publish` is left.

        Args:
            others: files that are known only now, by name; see ``Task.written_last``.

        Raises:
            CheckpointError: the source has changed since it was looked at.
            OutputError: it cannot be written.
        """
        check_unchanged(self._task.checkpoint.folder, self._task.checkpoint.all_files)
        for name, data in (others or {}).items():
            write_atomically(self.folder / name, data)
        write_atomically(self.folder / RECIPE_FILE, recipe)
        write_atomically(self.folder / RUN_FILE, run)
        with writing(self.folder):
            for folder, _, _ in os.walk(self.folder):
                sync_folder(folder)
        write_atomically(self.folder / REPORT_FILE, report)
        self._texts = [report.decode(), run.decode()]

    def publish(self) -> list[str]:
        """Make it the destination; the texts of the report and of its run.

        Raises:
            OutputError: the destination was taken meanwhile, another run has taken over, a file
                was changed, or something cannot be written.
        """
        self.lock.confirm()
        self._check_contents(is_complete=True)
        check_free(self._destination)
        with writing(self._destination):
            self._remove(self._aside)
            os.rename(self.work, self._aside)
            sync_folder(self.folder / SIDECAR)
            # From its owner's alone to what the source's folder is like.
            os.chmod(self.folder, top_mode(self._task.checkpoint.folders))
            os.rename(self.folder, self._destination)
            sync_folder(self._destination.parent)
        shutil.rmtree(self._aside, ignore_errors=True)
        return self._texts

    def discard(self, *, only_if_empty: bool = False) -> None:
        """Give up what there is.

        Args:
            only_if_empty: nothing if a unit is done, or something was prepared.
        """
        if not self.is_open or (only_if_empty and self._num_done()):
            return
        shutil.rmtree(self.folder, ignore_errors=True)

    def left(self) -> str:
        """A sentence: what is on the disk after a stop, and what to do with it."""
        if not self.folder.is_dir():
            return "Nothing of it is left on the disk."
        done = sum(self._task.units[unit].num_bytes for unit in self._done_units())
        return (
            f"{self.folder} keeps what is done, {format_size(done)} of "
            f"{format_size(self._task.num_bytes)}, and takes "
            f"{format_size(folder_bytes(self.folder))} of the disk: run the same command again to "
            f"go on from there, or {DISCARD_HINT}."
        )

    def _find_finished(self) -> list[str] | None:
        """The texts of the report if the destination is what this task makes."""
        try:
            texts = [(self._destination / name).read_text() for name in (REPORT_FILE, RUN_FILE)]
            report, run = (json.loads(text) for text in texts)
            sizes = self._task.sizes
            found = {name: os.stat(self._destination / name).st_size for name in sizes}
        except (OSError, ValueError, RecursionError):
            return None
        is_ours = (
            isinstance(report, dict)
            and isinstance(run, dict)
            and (report.get("status"), report.get("digest")) == ("complete", self._task.digest)
        )
        return texts if is_ours and found == sizes else None

    def _remove_remains(self) -> None:
        """Of a run that was killed between the last rename and its end, if it is no more."""
        if os.path.lexists(self.lock.path) or os.path.lexists(self._aside):
            with contextlib.suppress(OutputError):
                self.lock.acquire()
                self._remove(self._aside)

    def _check_others(self) -> None:
        own = (self.folder.name, self._aside.name)
        others = [path for path in partial_folders(self._destination) if path.name not in own]
        if others:
            raise OutputError(
                f"{others[0]} is the unfinished result of another "
                "recipe or source, or of a source that has changed since. Finish it with the "
                f"command that began it, {DISCARD_HINT}, or choose another destination."
            )

    def _open_folder(self) -> None:
        """Make the folder, or check the one that is there."""
        for path in (self.folder, self._aside):
            if os.path.lexists(path):
                check_own_folder(path)
        with writing(self.folder):
            if not self.folder.exists():
                self.folder.mkdir(mode=0o700)
            if self._aside.exists():
                if self.work.exists():  # of another run, before this one
                    self._remove(self._aside)
                else:  # killed, or failed, just before the last rename
                    os.rename(self._aside, self.work)
            os.chmod(self.folder, 0o700)
        self._check_contents()
        self.is_open = True
        with writing(self.folder):
            make_folders(self._task.checkpoint.folders, self.folder)
            self.work.mkdir(parents=True, exist_ok=True)

    def _check_contents(self, *, is_complete: bool = False) -> None:
        """Raise OutputError for what no run of this task writes.

        Args:
            is_complete: every file has to be there as well, and in its size.
        """
        sizes = self._task.sizes
        last = {RECIPE_FILE, REPORT_FILE, RUN_FILE, *self._task.written_last}
        files = {*sizes, *last}
        small = {name + NEW for name in last}
        work = {f"{_WORK}/{_PREPARED}", f"{_WORK}/{_PREPARED}{NEW}"}
        folders = {str(up) for name in (*files, *work) for up in Path(name).parents}
        folders |= {name for name, _ in self._task.checkpoint.folders}
        with writing(self.folder):
            for folder, inner, names in os.walk(self.folder, onerror=_raise):
                where = Path(folder)
                for name in inner:
                    check_own_folder(where / name)
                    if str((where / name).relative_to(self.folder)) not in folders:
                        raise self._unknown(where / name)
                for name in names:
                    path = where / name
                    check_own_file(str(path), path)
                    inside = str(path.relative_to(self.folder))
                    is_noted = where == self.work and is_journal(name)
                    if not is_noted and inside not in files | small | work:
                        raise self._unknown(path)
            if is_complete:
                for name, size in sizes.items():
                    found = os.stat(self.folder / name).st_size
                    if found != size:
                        raise OutputError(
                            f"{self.folder / name} has {found} bytes; expected {size}. It was "
                            "changed during the run. Run the same command again: it does that file "
                            "again."
                        )

    def _unknown(self, path: Path) -> OutputError:
        return OutputError(
            f"{path} was not written by distprune; expected only files of the result, since all "
            f"that is there is published. Remove it, or {DISCARD_HINT}."
        )

    def _find_done(self) -> tuple[Any, list[tuple[int, dict[str, int]]], int]:
        """What was prepared; units that are done, with checksums; how many lost a file."""
        sizes = self._task.sizes
        is_there = {}
        for name, size in sizes.items():
            try:
                is_there[name] = os.lstat(self.folder / name).st_size == size
            except OSError:
                is_there[name] = False
        try:
            line = read_small(self.work / _PREPARED)
        except OSError:
            prepared = None
        else:
            prepared = unsealed(line, self._task.digest)
            if prepared is None:  # edited: nobody knows what the units were made from
                return None, [], len(self._done_units())
        records = read_records(self.work, self._task.digest)
        done, num_lost = [], 0
        for number, record in sorted(records.items()):
            if not 0 <= number < len(self._task.units):
                continue
            if all(is_there[name] for name in self._task.ranges(self._task.units[number])):
                done.append((number, record.get("crc32", {})))
            else:
                num_lost += 1
        return prepared, done, num_lost

    def _done_units(self) -> set[int]:
        try:
            found = read_records(self.work, self._task.digest)
        except OSError:
            return set()
        return {unit for unit in found if 0 <= unit < len(self._task.units)} if found else set()

    def _num_done(self) -> int:
        return len(self._done_units()) + (self.work / _PREPARED).exists()

    def _allocate(self) -> None:
        sizes = self._task.sizes
        num_needed = sum(missing_bytes(self.folder / name, size) for name, size in sizes.items())
        check_free_bytes(self.folder, num_needed, self._destination)
        modes = self._task.modes
        for name, size in sizes.items():
            path = self.folder / name
            with writing(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
            allocate(str(path), size, modes[name])
        layout = self._task.layout
        if layout is not None:
            files = OpenFiles(WRITE)
            try:
                write_from(files, str(self.folder / MASK_FILE), 0, layout.header)
                files.sync()
            finally:
                files.close()

    def _remove(self, folder: Path) -> None:
        """A folder of this task's, if it is there."""
        if os.path.lexists(folder):
            check_own_folder(folder)
            with writing(folder):
                shutil.rmtree(folder)


def _raise(error: OSError) -> None:
    raise error
