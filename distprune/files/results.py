"""Make a result in units, on any number of ranks; an interrupted run can be resumed.

[Note: resume] Units depend on the task alone. A finished unit is recorded in a journal with its
checksum, once its bytes are on the disk. A resumed run compares all recorded units with the disk,
and makes the missing and the damaged ones from the source, which never changes. So the bytes of the
result depend neither on interruptions nor on the number of ranks.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distprune._common.memory import peak_rss_bytes
from distprune.files.disk.access import read_into
from distprune.files.errors import FilesError, NaNError, RanksError, SelectionError
from distprune.files.journals import Journal, all_records, recheck
from distprune.files.partial import Partial
from distprune.files.reports import Record, RunFacts
from distprune.files.rewriting import FileSink, Pieces, rewritten
from distprune.files.team import Team
from distprune.files.text import format_size
from distprune.files.units import CopyUnit, Task, units_by_rank

_PIECE = 4 << 20  # bytes that are copied at a time
# Writes the small files of a result, by the records of all units.
Complete = Callable[[Partial, Sequence[Record], RunFacts], None]


@contextlib.contextmanager
def resumed(
    team: Team,
    task: Task,
    destination: Path,
    *,
    bytes_to_prepare: int = 0,
    tell: Callable[[str], None] | None = None,
) -> Iterator[Run]:
    """Start to make a result, or go on where an earlier run was stopped. Collective.

    Args:
        team: the ranks that share the work.
        task: to carry out.
        destination: absolute.
        bytes_to_prepare: that are read before the first unit is written.
        tell: called with sentences for the user.

    Yields:
        The run. Its result appears by :meth:`Run.publish`; if that is not reached, the finished
        units stay for the next run.

    Raises:
        FilesError: of any kind, on every rank; its text says what is left on the disk.
    """
    run = Run(team, task, Partial(task, destination), tell or (lambda text: None))
    try:
        run.start(bytes_to_prepare)
        yield run
    except FilesError as error:
        run.clear_up(error)
        raise
    finally:
        run.partial.lock.release()


@dataclass
class Run:
    """A result while it is made; see :func:`resumed`.

    Attributes:
        team, task, tell: as for :func:`resumed`.
        partial: its folder. Only the leader uses it.
        texts: of the report and of its run, once the result is complete.
        prepared: what an earlier run kept for all units; None if there is nothing.
        number: of this run, among those that have a journal.
        finished: numbers of units.
        seconds: that each phase took.
    """

    team: Team
    task: Task
    partial: Partial
    tell: Callable[[str], None]
    texts: list[str] | None = None
    prepared: Any = None
    number: int = 0
    finished: set[int] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)

    def start(self, bytes_to_prepare: int) -> None:
        """Find what earlier runs have finished, and whether it is still as they wrote it."""
        team, task = self.team, self.task
        state = team.from_leader(self.partial.start)
        self.texts = state["finished"]
        if self.texts is not None:
            self.tell(
                f"{self.partial.destination} is finished: this command made it before. Nothing was "
                "changed."
            )
            return
        self.prepared, self.number = state["prepared"], state["run"]
        checksums: dict[int, dict[str, int]] = dict(state["units"])
        num_recorded = sum(task.units[number].num_bytes for number in checksums)
        if checksums:
            team.expect("check", num_recorded)
        if self.prepared is None:
            team.expect("count", bytes_to_prepare)
        team.expect("write", task.num_bytes, num_recorded)
        if not checksums:
            return
        with self.timing("check"):
            self.finished = self._recheck(checksums, num_recorded)
        num_bytes = sum(task.units[number].num_bytes for number in self.finished)
        self.tell(
            f"Resuming: {format_size(num_bytes)} of {format_size(task.num_bytes)} are finished."
        )
        num_damaged = len(checksums) - len(self.finished)
        if num_damaged:
            parts = "finished part is" if num_damaged == 1 else "finished parts are"
            self.tell(f"{num_damaged} {parts} missing or damaged and will be written again.")

    def write(self, pieces: Pieces) -> None:
        """Do the units that are missing. Collective.

        Args:
            pieces: which elements of the task's tensors are pruned.
        """
        team, task = self.team, self.task
        missing = [(i, unit) for i, unit in enumerate(task.units) if i not in self.finished]
        mine = units_by_rank(missing, team.size)[team.index]
        sink = FileSink(task, self.partial.folder)
        journal = Journal(self.partial.work, task.digest, self.number, team.index, sink.outputs)
        num_missing = sum(unit.num_bytes for _, unit in missing)
        with self.timing("write"), contextlib.closing(sink.outputs):
            try:
                team.begin("write", task.num_bytes, task.num_bytes - num_missing)
                team.work(self._steps(mine, pieces, sink, journal))
            finally:
                # Record the finished units, whatever stopped the others; that error comes first.
                error: Exception | None = None
                try:
                    journal.flush()
                except Exception as caught:
                    error = caught
            team.check(error)

    def publish(self, complete: Complete) -> None:
        """Let the leader write the last files, and rename the folder. Collective."""
        facts = RunFacts(
            num_ranks=self.team.size,
            seconds=self.seconds,
            peak_rss_bytes=self.team.share(peak_rss_bytes()),
            num_bytes=self.task.num_bytes,
            versions=versions(),
        )

        def publish() -> list[str]:
            complete(self.partial, all_records(self.task, self.partial.work), facts)
            return self.partial.publish()

        self.texts = self.team.from_leader(publish)

    @contextlib.contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Measure a phase, for the report."""
        began = time.monotonic()
        yield
        self.seconds[phase] = round(time.monotonic() - began, 3)

    def clear_up(self, error: FilesError) -> None:
        """Remove what no run can use, and add to the error what is left."""
        is_lost = isinstance(error, RanksError)
        if not is_lost:  # wait until every rank has closed its files
            with contextlib.suppress(RanksError):
                self.team.check(None)
        if not self.team.is_leader:
            if is_lost and self.partial.folder.is_dir():
                error.say_more(self.partial.left())
            return
        if not self.partial.is_open:
            return
        if isinstance(error, (NaNError, SelectionError)):  # the same task would fail again
            self.partial.discard()
        elif not is_lost:
            self.partial.discard(only_if_empty=True)
        error.say_more(self.partial.left())

    def _recheck(self, checksums: dict[int, dict[str, int]], num_bytes: int) -> set[int]:
        """The recorded units whose bytes are on the disk; the same on every rank."""
        numbered = [(number, self.task.units[number]) for number in checksums]
        mine = units_by_rank(numbered, self.team.size)[self.team.index]
        recorded = [(number, checksums[number]) for number in mine]
        found: list[int] = []
        self.team.begin("check", num_bytes)
        self.team.work(recheck(self.task, self.partial.folder, recorded, found))
        return checksums.keys() - set().union(*self.team.share(found))

    def _steps(
        self, mine: list[int], pieces: Pieces, sink: FileSink, journal: Journal
    ) -> Iterator[int]:
        folder, outputs = self.partial.folder, sink.outputs
        for number in mine:
            unit = self.task.units[number]
            outputs.take_checksums()
            record: dict[str, Any] = {"unit": number}
            if isinstance(unit, CopyUnit):
                for start in range(unit.start, unit.stop, _PIECE):
                    piece = memoryview(bytearray(min(_PIECE, unit.stop - start)))
                    read_into(unit.path, start, piece)
                    outputs.write(str(folder / unit.name), start, piece)
                    yield len(piece)
            else:
                yield from rewritten(unit, pieces, sink.add, record)
            record["crc32"] = {
                str(Path(path).relative_to(folder)): checksum
                for path, checksum in outputs.take_checksums().items()
            }
            journal.add(record, unit.num_bytes)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }
