"""Units that earlier runs of a task finished: their journals, and whether their bytes are there.

[Note: journals] A journal has one line of JSON for each finished unit. A line begins with a seal:
the first 16 hexadecimal digits of the SHA-256 of the plan's digest and the rest of the line. A line
that was cut off, edited, or belongs to another plan is ignored.

[Note: recheck] A loss of power, a repair of the file system or a clean-up can remove or zero bytes
that were written and recorded. So all of them are read again before a run continues: that is far
less work than to make them, and nothing wrong can be published. They are compared by the crc32 of
what was written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distprune.files.checkpoints.mask_files import MASK_FILE
from distprune.files.disk.access import (
    NEW,
    OutputFiles,
    read_into,
    write_all,
    write_atomically,
    writing,
)
from distprune.files.errors import CheckpointError, OutputError
from distprune.files.units import Task

# After a kill, the units of at most so many bytes have to be written again.
_FLUSH_BYTES = 1 << 28
_NAME = re.compile(r"done-(\d+)-\d+\.jsonl")
# What all units need, in the folder of journals, and the names there that are no journals'.
PREPARED_FILE = "decision.json"
SMALL_FILES = (PREPARED_FILE, PREPARED_FILE + NEW)
_PIECE = 4 << 20
# Number of a unit, and by name of a file the crc32 of what it wrote there.
Recorded = tuple[int, dict[str, int]]


class Journal:
    """The units that one rank finished in one run, each recorded when its bytes are on the disk.

    Args:
        work: the folder of journals.
        digest: of the plan.
        run: number of the run, from :func:`next_run`.
        rank: of this process.
        outputs: files to sync before a line is written.
    """

    def __init__(self, work: Path, digest: str, run: int, rank: int, outputs: OutputFiles) -> None:
        self._path = work / f"done-{run:04d}-{rank:04d}.jsonl"
        self._digest = digest
        self._outputs = outputs
        self._pending: list[str] = []
        self._num_bytes = 0

    def add(self, record: dict[str, Any], num_bytes: int) -> None:
        """Record a finished unit.

        Args:
            record: of the unit, its number under "unit".
            num_bytes: of the unit.

        Raises:
            OutputError: the disk reports an error.
        """
        self._pending.append(sealed(record, self._digest))
        self._num_bytes += num_bytes
        if self._num_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Sync the outputs and write the lines, so that they survive a loss of power.

        Raises:
            OutputError: the disk reports an error.
        """
        if not self._pending:
            return
        self._outputs.sync()
        lines = "".join(line + "\n" for line in self._pending).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with writing(self._path):
            descriptor = os.open(self._path, flags, 0o600)
            try:
                write_all(descriptor, lines)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._pending, self._num_bytes = [], 0


def is_journal(name: str) -> bool:
    """Whether a name is that of a journal."""
    return _NAME.fullmatch(name) is not None


def next_run(work: Path) -> int:
    """The number of a new run: one more than that of the last one."""
    return max((int(name.split("-")[1]) for name in _journals(work)), default=-1) + 1


def sealed(value: Any, digest: str) -> str:
    """A value as a line: its seal and its JSON."""
    text = json.dumps(value)
    return f"{_seal(text, digest)} {text}"


def unsealed(line: bytes, digest: str) -> Any:
    """The value of a line from :func:`sealed`; None if the line was changed."""
    try:
        seal, _, text = line.decode().strip().partition(" ")
    except UnicodeDecodeError:
        return None
    return json.loads(text) if seal == _seal(text, digest) else None


def _seal(text: str, digest: str) -> str:
    return hashlib.sha256(f"{digest}\n{text}".encode()).hexdigest()[:16]


def _journals(work: Path) -> list[str]:
    """The names of journals, in the order of their runs."""
    return sorted(filter(is_journal, os.listdir(work))) if work.is_dir() else []


def keep_prepared(task: Task, work: Path, value: Any) -> None:
    """Keep the JSON value that all units need, for the next run."""
    write_atomically(work / PREPARED_FILE, f"{sealed(value, task.digest)}\n".encode())


def finished_units(task: Task, work: Path) -> dict[int, dict[str, Any]]:
    """By number of a finished unit, its record by the last run that wrote it."""
    records: dict[int, dict[str, Any]] = {}
    for name in _journals(work):
        for line in (work / name).read_bytes().split(b"\n")[:-1]:
            record = unsealed(line, task.digest)
            if record is not None and 0 <= record["unit"] < len(task.units):
                records[record["unit"]] = record
    return dict(sorted(records.items()))


def all_records(task: Task, work: Path) -> list[dict[str, Any]]:
    """The records of all units, in order.

    Raises:
        OutputError: some are missing, although all units are finished.
    """
    records = finished_units(task, work)
    missing = [unit for unit in range(len(task.units)) if unit not in records]
    if missing:
        raise OutputError(
            f"{work} has no record of {len(missing)} of {len(task.units)} units, such as unit "
            f"{missing[0]}, although this run has finished them; it was changed during the run. "
            "Run the same command again: it does what is missing."
        )
    return list(records.values())


def usable(task: Task, work: Path) -> tuple[Any, list[Recorded]]:
    """What the next run can use of an unfinished result.

    Args:
        task: it belongs to it.
        work: the folder of journals in it.

    Returns:
        The value of :func:`keep_prepared`, or None; and the finished units. If that value was
        edited, units may have been made from another one: their checksums are left out.
    """
    records, prepared, is_edited = finished_units(task, work), None, False
    with contextlib.suppress(OSError):
        prepared = unsealed((work / PREPARED_FILE).read_bytes(), task.digest)
        is_edited = prepared is None
    return prepared, [
        (number, {} if is_edited else record.get("crc32", {})) for number, record in records.items()
    ]


def recheck(
    task: Task, folder: Path, recorded: Sequence[Recorded], damaged: list[int]
) -> Iterator[int]:
    """Check units that are recorded as done; yields the bytes that were processed.

    Args:
        task: that they belong to.
        folder: where they were written.
        recorded: the units.
        damaged: gets the numbers of those that are not as they were written.
    """
    for number, checksums in recorded:
        found: dict[str, int] = {}
        with contextlib.suppress(CheckpointError):
            for name, runs in task.ranges(task.units[number]).items():
                for start, stop in runs:
                    for first in range(start, stop, _PIECE):
                        written = np.empty(min(_PIECE, stop - first), np.uint8)
                        read_into(str(folder / name), first, written.data)
                        found[name] = zlib.crc32(written.data, found.get(name, 0))
                        yield len(written) if name != MASK_FILE else 0
        if found != checksums:
            damaged.append(number)
