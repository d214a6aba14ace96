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
    OpenFiles,
    read_into,
    read_small,
    write_all,
    write_atomically,
    writing,
)
from distprune.files.errors import CheckpointError, OutputError
from distprune.files.units import CopyUnit, SpanUnit, Task, Unit

# After a kill, the units of at most so many bytes have to be written again.
_FLUSH_BYTES = 1 << 28
_NAME = re.compile(r"done-(\d+)-\d+\.jsonl")


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


PREPARED_FILE = "decision.json"
# Names in the folder of journals, besides the journals.
SMALL_FILES = (PREPARED_FILE, PREPARED_FILE + NEW)


class FinishedUnits:
    """The finished units of a task.

    Args:
        task: the units belong to it.
        folder: the unfinished result.
        work: the folder of journals in it.
    """

    def __init__(self, task: Task, folder: Path, work: Path) -> None:
        self._task = task
        self._folder = folder
        self._work = work

    def write_prepared(self, value: Any) -> None:
        """Keep the JSON value that all units need, for the next run."""
        line = sealed(value, self._task.digest) + "\n"
        write_atomically(self._work / PREPARED_FILE, line.encode())

    def records(self) -> list[dict[str, Any]]:
        """The records of all units, in order.

        Raises:
            OutputError: some are missing, although all units are finished.
        """
        records = read_records(self._work, self._task.digest)
        missing = [unit for unit in range(len(self._task.units)) if unit not in records]
        if missing:
            raise OutputError(
                f"{self._work} has no record of {len(missing)} of {len(self._task.units)} units, "
                f"such as unit {missing[0]}, although this run has finished them; it was changed "
                "during the run. Run the same command again: it does what is missing."
            )
        return [records[unit] for unit in range(len(self._task.units))]

    def find(self) -> tuple[Any, list[tuple[int, dict[str, int]]], int]:
        """Find what the next run can use.

        Returns:
            The value of :meth:`write_prepared`, or None; (number, checksums) of the units whose
            files have their full size; and how many units have lost a file.
        """
        is_complete = {}
        for name, size in self._task.sizes.items():
            try:
                is_complete[name] = os.lstat(self._folder / name).st_size == size
            except OSError:
                is_complete[name] = False
        try:
            line = read_small(self._work / PREPARED_FILE)
        except OSError:
            prepared = None
        else:
            prepared = unsealed(line, self._task.digest)
            if prepared is None:  # edited: the units may have been made from another value
                return None, [], len(self.numbers())
        records = read_records(self._work, self._task.digest)
        units, num_lost = [], 0
        for number, record in sorted(records.items()):
            if not 0 <= number < len(self._task.units):
                continue
            if all(is_complete[name] for name in self._task.ranges(self._task.units[number])):
                units.append((number, record.get("crc32", {})))
            else:
                num_lost += 1
        return prepared, units, num_lost

    def numbers(self) -> set[int]:
        """Numbers of the units with a record; empty if the records cannot be read."""
        try:
            records = read_records(self._work, self._task.digest)
        except OSError:
            return set()
        if not records:
            return set()  # without cutting the work into units
        return {number for number in records if 0 <= number < len(self._task.units)}

    def is_empty(self) -> bool:
        """Whether no unit is finished and nothing was prepared."""
        return not self.numbers() and not (self._work / PREPARED_FILE).exists()

    def num_bytes(self) -> int:
        """Bytes of the finished units."""
        return sum(self._task.units[number].num_bytes for number in self.numbers())


_PIECE = 4 << 20
# Number of a unit, and by name of a file the crc32 of what it wrote there.
Recorded = tuple[int, dict[str, int]]


class Rechecker:
    """Checks units that are recorded as done.

    Args:
        task: that they belong to.
        folder: where they were written.
        sources: files of the source, opened for reading.

    Attributes:
        damaged: numbers of the units that are not as they were written.
    """

    def __init__(self, task: Task, folder: Path, sources: OpenFiles) -> None:
        self.damaged: list[int] = []
        self._task = task
        self._folder = folder
        self._sources = sources
        self._outputs = OpenFiles(os.O_RDONLY | os.O_NOFOLLOW)
        self._buffers = [np.empty(_PIECE, np.uint8) for _ in range(2)]

    def steps(self, recorded: Sequence[Recorded]) -> Iterator[int]:
        """Check units; yields the bytes that were processed.

        Raises:
            CheckpointError: the source cannot be read.
        """
        for number, checksums in recorded:
            unit = self._task.units[number]
            seen = 0
            for is_good, num_bytes in self._check(unit, checksums):
                seen += num_bytes
                yield num_bytes
                if not is_good:
                    self.damaged.append(number)
                    break
            yield unit.num_bytes - seen

    def close(self) -> None:
        """Close the files of the result."""
        self._outputs.close()

    def _check(self, unit: Unit, checksums: dict[str, int]) -> Iterator[tuple[bool, int]]:
        """For every piece: whether it is good, as far as is known yet; and its bytes."""
        if isinstance(unit, CopyUnit):
            yield from self._check_copy(unit)
        else:
            yield from self._check_rewritten(unit, checksums)

    def _check_copy(self, unit: CopyUnit) -> Iterator[tuple[bool, int]]:
        for first in range(unit.start, unit.stop, _PIECE):
            written = self._read(unit.name, first, min(first + _PIECE, unit.stop))
            if written is None:
                yield False, 0
                return
            expected = self._buffers[1][: len(written)]
            read_into(self._sources, unit.path, first, expected.data)
            yield np.array_equal(written, expected), len(written)

    def _check_rewritten(
        self, unit: SpanUnit, checksums: dict[str, int]
    ) -> Iterator[tuple[bool, int]]:
        ranges = self._task.ranges(unit)
        if set(ranges) != set(checksums):
            yield False, 0
            return
        for name, pieces in ranges.items():
            checksum = 0
            for start, stop in pieces:
                for first in range(start, stop, _PIECE):
                    written = self._read(name, first, min(first + _PIECE, stop))
                    if written is None:
                        yield False, 0
                        return
                    checksum = zlib.crc32(written.data, checksum)
                    yield True, len(written) if name != MASK_FILE else 0
            yield checksum == checksums[name], 0

    def _read(self, name: str, start: int, stop: int) -> np.ndarray | None:
        """Bytes of an output; None if it cannot be read."""
        buffer = self._buffers[0][: stop - start]
        try:
            read_into(self._outputs, str(self._folder / name), start, buffer.data)
        except CheckpointError:
            return None
        return buffer
