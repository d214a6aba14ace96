"""The folder in which a result grows until one rename makes it the destination.

    DST.partial.lock            held by the run that is at work
    DST.partial-<plan>/         all output files, in full size from the start
        distprune/work/         which units are done, and the decision: gone before the rename
        distprune/report.json   written last: nothing is left to do but to rename

Only the leader calls what is here, but for :class:`Journal`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distprune.files.checkpoint import SIDECAR
from distprune.files.deciding import Decision
from distprune.files.disk import (
    OpenFiles,
    allocate,
    sync_folder,
    write_atomically,
    write_from,
    writing,
)
from distprune.files.errors import CheckpointError, OutputError
from distprune.files.masks import MASK_FILE, MaskLayout
from distprune.files.model_card import card_of
from distprune.files.planning import CARD_FILE, Plan
from distprune.files.report import REPORT_FILE, RUN_FILE, Report

RECIPE_FILE = f"{SIDECAR}/recipe.yaml"
_WORK = f"{SIDECAR}/work"
# How much may have to be done again after a kill.
_FLUSH_BYTES = 1 << 28


class Lock:
    """One run at a time on a destination.

    [Note: lock] A file names the host and the process, and is locked by flock: the system
    unlocks it when the process ends, however it ends. So a lock of this host that is not flocked
    is stale and is taken over; one of another host cannot be told from a stale one.

    Args:
        destination: absolute.
    """

    def __init__(self, destination: Path) -> None:
        self._path = f"{destination}.partial.lock"
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Raises OutputError, with the owner, if another run has it."""
        host = socket.gethostname()
        while True:
            with writing(self._path):
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_free = True
            except OSError:
                is_free = False
            owner = _read_owner(descriptor)
            if not is_free or owner.get("host", host) != host:
                os.close(descriptor)
                raise OutputError(
                    f"process {owner.get('pid')} on {owner.get('host')} is at work on this "
                    f"destination. Wait for it; if it is no more, delete {self._path}."
                )
            if _is_same_file(descriptor, self._path):
                break
            os.close(descriptor)  # it was removed between open and flock
        self._descriptor = descriptor
        with writing(self._path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"host": host, "pid": os.getpid()}).encode(), 0)

    def release(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            os.close(self._descriptor)
            self._descriptor = None


class Partial:
    """The unfinished result of a plan.

    Args:
        plan: what to do.
        destination: absolute.
        layout: of the masks; None: none are wanted.
    """

    def __init__(self, plan: Plan, destination: Path, layout: MaskLayout | None) -> None:
        self._plan = plan
        self._destination = destination
        self._layout = layout
        self.folder = destination.with_name(f"{destination.name}.partial-{plan.digest[:16]}")
        self.work = self.folder / _WORK
        self.lock = Lock(destination)

    def start(self) -> dict[str, Any]:
        """Take the lock, make all files or find them; what is done already, as JSON.

        Raises:
            OutputError: the destination exists or is in use, another plan is half done
                there, or there is not enough room.
        """
        check_place(self._plan.checkpoint.folder, self._destination)
        self.lock.acquire()
        check_free(self._destination)
        others = [
            name
            for name in os.listdir(self._destination.parent)
            if name.startswith(f"{self._destination.name}.partial-") and name != self.folder.name
        ]
        if others:
            raise OutputError(
                f"{self._destination.parent / others[0]} is the unfinished result of another "
                "recipe or source, or of a source that has changed since. Finish it with the "
                "command that began it, delete it, or choose another destination."
            )
        if (self.folder / REPORT_FILE).exists():
            return {"is_complete": True}
        with writing(self.folder):
            self.work.mkdir(parents=True, exist_ok=True)
        self._allocate()
        journals = sorted(self.work.glob("done-*.jsonl"))
        return {
            "is_complete": False,
            "run": len(journals),
            "done": [record["unit"] for record in self.records()],
            "decision": self._read_decision(),
        }

    def write_decision(self, decision: Decision) -> None:
        write_atomically(self.work / "decision.json", json.dumps(asdict(decision)).encode())

    def records(self) -> list[dict[str, Any]]:
        """Of all units that are done, by whatever rank and run; each unit once."""
        found: dict[int, dict[str, Any]] = {}
        for path in sorted(self.work.glob("done-*.jsonl")):
            found |= {record["unit"]: record for record in _read_records(path)}
        return [found[unit] for unit in sorted(found)]

    def complete(self, report: Report) -> None:
        """Write the card and the report: from here on only :meth:`publish` is left.

        Raises:
            CheckpointError: the source has changed since the plan was made.
            OutputError: it cannot be written.
        """
        check_unchanged(self._plan)
        card = card_of(self._plan, report)
        if card is not None:
            write_atomically(self.folder / CARD_FILE, card)
        write_atomically(self.folder / RECIPE_FILE, self._plan.recipe.to_yaml().encode())
        write_atomically(self.folder / RUN_FILE, report.run_json())
        with writing(self.folder):
            for folder, _, _ in os.walk(self.folder):
                sync_folder(folder)
        write_atomically(self.folder / REPORT_FILE, report.result_json())

    def publish(self) -> list[str]:
        """Make it the destination; the texts of the report.

        Raises:
            OutputError: the destination was taken meanwhile, or cannot be written.
        """
        with writing(self._destination):
            texts = [(self.folder / name).read_text() for name in (REPORT_FILE, RUN_FILE)]
            shutil.rmtree(self.work, ignore_errors=True)
            sync_folder(self.folder / SIDECAR)
            check_free(self._destination)
            os.rename(self.folder, self._destination)
            sync_folder(self._destination.parent)
        return texts

    def discard(self) -> None:
        """Give up: what there is can never be finished."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _allocate(self) -> None:
        checkpoint = self._plan.checkpoint
        sizes = {file.name: file.size for file in (*checkpoint.files, *self._plan.copied)}
        if self._layout is not None:
            sizes[MASK_FILE] = self._layout.size
        missing = sum(_missing(self.folder / name, size) for name, size in sizes.items())
        with writing(self.folder):
            disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        if missing > free:
            raise OutputError(
                f"{self._destination} needs {missing:,} more bytes, but {free:,} are free there. "
                "Make room and run the same command again, or choose another destination."
            )
        for name, size in sizes.items():
            path = self.folder / name
            with writing(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
            allocate(str(path), size)
        if self._layout is not None:
            files = OpenFiles(os.O_RDWR)
            try:
                write_from(files, str(self.folder / MASK_FILE), 0, self._layout.header)
                files.sync()
            finally:
                files.close()

    def _read_decision(self) -> dict[str, Any] | None:
        path = self.work / "decision.json"
        return json.loads(path.read_bytes()) if path.exists() else None


class Journal:
    """What one rank has done in one run: a line for each unit, written once its bytes are safe.

    Args:
        work: the folder for it.
        run: number of the run, a new one each time.
        rank: this rank's.
        outputs: what to sync first.
    """

    def __init__(self, work: Path, run: int, rank: int, outputs: OpenFiles) -> None:
        self._path = work / f"done-{run:04d}-{rank:04d}.jsonl"
        self._outputs = outputs
        self._pending: list[str] = []
        self._num_bytes = 0

    def add(self, record: dict[str, Any], num_bytes: int) -> None:
        """A unit is done."""
        self._pending.append(json.dumps(record))
        self._num_bytes += num_bytes
        if self._num_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Make all that was added survive a loss of power.

        Raises:
            OutputError: the disk could not take it.
        """
        if not self._pending:
            return
        self._outputs.sync()
        lines = "".join(line + "\n" for line in self._pending).encode()
        with writing(self._path), open(self._path, "ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        self._pending, self._num_bytes = [], 0


def check_free(destination: Path) -> None:
    """Raise OutputError if the destination exists."""
    if os.path.lexists(destination):
        is_done = (destination / REPORT_FILE).exists()
        found = "holds a finished result of distprune" if is_done else "exists"
        raise OutputError(
            f"{destination} {found}; expected a name that is free. Delete it, or choose another."
        )


def check_place(source: str, destination: Path) -> None:
    """Raise OutputError if the destination is the source, lies inside it, or in no folder."""
    inside, around = Path(os.path.realpath(destination)), Path(os.path.realpath(source))
    if inside == around or around in inside.parents:
        raise OutputError(
            f"{destination} lies inside the source {source}; expected a place outside of it."
        )
    if not destination.parent.is_dir():
        raise OutputError(f"{destination.parent} is no folder; make it first.")


def check_unchanged(plan: Plan) -> None:
    """Raise CheckpointError if a file of the source is not as it was when the plan was made."""
    changed = []
    for file in (*plan.checkpoint.files, *plan.checkpoint.others):
        try:
            info = os.stat(file.path)
        except OSError:
            changed.append(f"{file.name} is gone.")
            continue
        if (info.st_size, info.st_mtime_ns) != (file.size, file.mtime_ns):
            changed.append(f"{file.name} has changed.")
    if changed:
        raise CheckpointError(
            f"{plan.checkpoint.folder} has changed since its headers were read; expected a source "
            "that stays as it is:",
            changed,
        )


def _read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal; the last one may be cut off."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _missing(path: Path, size: int) -> int:
    """Bytes that a file of this size still needs on the disk."""
    return max(size - path.stat().st_blocks * 512, 0) if path.exists() else size


def _read_owner(descriptor: int) -> dict[str, Any]:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _is_same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
