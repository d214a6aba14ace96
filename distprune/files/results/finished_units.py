"""Units that earlier runs of a task finished, read from its folder of journals."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from distprune.files.disk.access import NEW, read_small, write_atomically
from distprune.files.disk.journal import read_records, sealed, unsealed
from distprune.files.errors import OutputError
from distprune.files.results.task import Task

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
