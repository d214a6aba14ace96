"""Units that earlier runs of a task finished: their journals, and whether their bytes are there.

[Note: journals] A journal has one line of JSON for each finished unit. A line begins with a seal:
the first 16 hexadecimal digits of the SHA-256 of the plan's digest and the rest of the line. A line
that was cut off, edited, or belongs to another plan is ignored.

[Note: recheck] A loss of power, a repair of the file system or a clean-up can remove or zero bytes
that were written and recorded. So all of them are read again before a run continues: that is far
less work than to make them, and nothing wrong can be published. Rewritten units are compared by
the crc32 of what was written; copies, whose bytes never pass through the process, with the source.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import zlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distprune.files.checkpoints.mask_files import MASK_FILE
from distprune.files.disk.access import (
    NEW,
    OpenFiles,
    read_into,
    read_small,
    write_all,
    write_atomically,
    writing,
)
from distprune.files.errors import CheckpointError, OutputError
from distprune.files.units import CopyUnit, Task

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

    def __init__(self, work: Path, digest: str, run: int, rank: int, outputs: OpenFiles) -> None:
        self._path = work / f"done-{run:04d}-{rank:04d}.jsonl"
        self._digest = digest
        self._outputs = outputs
        self._pending: list[str] = []
        self._num_bytes = 0
        self._is_new = True

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
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        if self._is_new:
            flags |= os.O_CREAT | os.O_EXCL
        with writing(self._path):
            descriptor = os.open(self._path, flags, 0o600)
            self._is_new = False
            try:
                write_all(descriptor, lines)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._pending, self._num_bytes = [], 0


def is_journal(name: str) -> bool:
    """Whether a name is that of a journal."""
    return _NAME.fullmatch(name) is not None


def read_records(work: Path, digest: str) -> dict[int, dict[str, Any]]:
    """By number of a finished unit, its record by the last run that wrote it."""
    records: dict[int, dict[str, Any]] = {}
    for name in sorted(_journals(work), key=lambda name: (run_of(name), name)):
        for line in read_small(work / name).split(b"\n")[:-1]:
            record = unsealed(line, digest)
            if record is not None:
                records[record["unit"]] = record
    return records


def next_run(work: Path) -> int:
    """The number of a new run: one more than that of the last one."""
    return max((run_of(name) for name in _journals(work)), default=-1) + 1


def run_of(name: str) -> int:
    """The number of the run that wrote a journal; -1 for a name that is not a journal's."""
    match = _NAME.fullmatch(name)
    return -1 if match is None else int(match[1])


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
    return [name for name in os.listdir(work) if is_journal(name)] if work.is_dir() else []


def keep_prepared(task: Task, work: Path, value: Any) -> None:
    """Keep the JSON value that all units need, for the next run."""
    write_atomically(work / PREPARED_FILE, f"{sealed(value, task.digest)}\n".encode())


def all_records(task: Task, work: Path) -> list[dict[str, Any]]:
    """The records of all units, in order.

    Raises:
        OutputError: some are missing, although all units are finished.
    """
    records = read_records(work, task.digest)
    missing = [unit for unit in range(len(task.units)) if unit not in records]
    if missing:
        raise OutputError(
            f"{work} has no record of {len(missing)} of {len(task.units)} units, such as unit "
            f"{missing[0]}, although this run has finished them; it was changed during the run. "
            "Run the same command again: it does what is missing."
        )
    return [records[unit] for unit in range(len(task.units))]


def readable_units(task: Task, work: Path) -> dict[int, dict[str, Any]]:
    """The records of the finished units, by number; none if the records cannot be read."""
    with contextlib.suppress(OSError):
        return _finished_units(task, work)
    return {}


def _finished_units(task: Task, work: Path) -> dict[int, dict[str, Any]]:
    records = read_records(work, task.digest)
    if not records:
        return {}  # without cutting the work into units
    return {number: each for number, each in records.items() if 0 <= number < len(task.units)}


def is_empty(task: Task, work: Path) -> bool:
    """Whether no unit is finished and nothing was prepared."""
    return not readable_units(task, work) and not (work / PREPARED_FILE).exists()


def usable(task: Task, folder: Path, work: Path) -> tuple[Any, list[Recorded], int]:
    """What the next run can use of an unfinished result.

    Args:
        task: it belongs to it.
        folder: the unfinished result.
        work: the folder of journals in it.

    Returns:
        The value of :func:`keep_prepared`, or None; the units whose files have their full size; and
        how many units have lost a file.
    """
    is_complete = {}
    for name, size in task.sizes.items():
        try:
            is_complete[name] = os.lstat(folder / name).st_size == size
        except OSError:
            is_complete[name] = False
    prepared = None
    with contextlib.suppress(OSError):
        prepared = unsealed(read_small(work / PREPARED_FILE), task.digest)
        if prepared is None:  # edited: the units may have been made from another value
            return None, [], len(readable_units(task, work))
    finished = sorted(_finished_units(task, work).items())
    units = [
        (number, record.get("crc32", {}))
        for number, record in finished
        if all(is_complete[name] for name in task.ranges(task.units[number]))
    ]
    return prepared, units, len(finished) - len(units)


class _DamagedError(Exception):
    """A unit is not as it was written."""


def recheck(
    task: Task, folder: Path, sources: OpenFiles, recorded: Sequence[Recorded], damaged: list[int]
) -> Generator[int, None, None]:
    """Check units that are recorded as done; yields the bytes that were processed.

    Args:
        task: that they belong to.
        folder: where they were written.
        sources: opens files of the source.
        recorded: the units.
        damaged: gets the numbers of those that are not as they were written.

    Raises:
        CheckpointError: the source cannot be read.
    """
    with contextlib.closing(OpenFiles(os.O_RDONLY | os.O_NOFOLLOW)) as outputs:
        for number, checksums in recorded:
            num_seen = 0
            try:
                for num_bytes in _compare(task, number, checksums, folder, sources, outputs):
                    num_seen += num_bytes
                    yield num_bytes
            except _DamagedError:
                damaged.append(number)
            yield task.units[number].num_bytes - num_seen


def _compare(
    task: Task,
    number: int,
    checksums: dict[str, int],
    folder: Path,
    sources: OpenFiles,
    outputs: OpenFiles,
) -> Iterator[int]:
    """Compare a unit with its checksums, or a copy with the source; yields bytes."""
    unit = task.units[number]
    ranges = task.ranges(unit)
    is_copy = isinstance(unit, CopyUnit)
    if not is_copy and ranges.keys() != checksums.keys():
        raise _DamagedError
    for name, runs in ranges.items():
        checksum = 0
        pieces = (
            (first, min(first + _PIECE, stop))
            for start, stop in runs
            for first in range(start, stop, _PIECE)
        )
        for first, last in pieces:
            written = np.empty(last - first, np.uint8)
            try:
                read_into(outputs, str(folder / name), first, written.data)
            except CheckpointError as error:
                raise _DamagedError from error
            if isinstance(unit, CopyUnit):
                expected = np.empty_like(written)
                read_into(sources, unit.path, first, expected.data)
                if not np.array_equal(written, expected):
                    raise _DamagedError
            else:
                checksum = zlib.crc32(written.data, checksum)
            yield len(written) if name != MASK_FILE else 0
        if not is_copy and checksum != checksums[name]:
            raise _DamagedError
