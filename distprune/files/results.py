"""Carrying out a task in units, on any number of ranks; an interrupted run can be resumed.

[Note: resume] Units depend on the task alone. A finished unit is recorded in a journal with its
checksum, once its bytes are on the disk. A resumed run compares all recorded units with the disk,
and makes the missing and the damaged ones from the source, which never changes. So the bytes of the
result depend neither on interruptions nor on the number of ranks.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from distprune._common.attempts import attempt, error_of
from distprune._common.memory import peak_rss_bytes
from distprune.files.disk.access import OpenFiles, copy_range
from distprune.files.errors import FilesError, NaNError, RanksError, SelectionError
from distprune.files.journals import Journal, Rechecker
from distprune.files.partial import Partial
from distprune.files.reports.report import RunFacts
from distprune.files.rewriting import FileSink, Pieces, Rewriter
from distprune.files.team import Team
from distprune.files.text import format_size
from distprune.files.units import CopyUnit, Task, units_by_rank


class Work(Protocol):
    """How a task is carried out. Every rank calls the same methods in the same order."""

    @property
    def sources(self) -> OpenFiles:
        """Files of the source."""
        ...

    def bytes_to_prepare(self) -> int:
        """Bytes that :meth:`prepare` will read if nothing was prepared; for the progress."""
        ...

    def prepare(self, partial: Partial, prepared: Any) -> None:
        """Compute what all units need; ``prepared`` is the value of an earlier run, or None."""
        ...

    def elements(self) -> Pieces:
        """Which elements of the task's tensors are pruned."""
        ...

    def complete(self, partial: Partial, run: RunFacts) -> None:
        """Write the report; called on the leader alone."""
        ...


def carry_out(
    team: Team,
    task: Task,
    work: Work,
    destination: Path,
    *,
    take_over: bool = False,
    tell: Callable[[str], None] | None = None,
) -> list[str]:
    """Make a result, or resume an unfinished one.

    Args:
        team: the ranks that share the work.
        task: to carry out.
        work: how to carry it out.
        destination: absolute.
        take_over: see ``Lock.acquire``.
        tell: called with sentences for the user.

    Returns:
        The texts of the report and of its run.

    Raises:
        FilesError: of any kind, on every rank; its text says what is left on the disk.
    """
    return _Run(team, task, work, destination, tell or (lambda text: None)).run(take_over)


class _Run:
    """One call of :func:`carry_out`."""

    def __init__(
        self,
        team: Team,
        task: Task,
        work: Work,
        destination: Path,
        tell: Callable[[str], None],
    ) -> None:
        self._team = team
        self._task = task
        self._work = work
        self._destination = destination
        self._tell = tell
        self._partial = Partial(task, destination)
        self._seconds: dict[str, float] = {}

    def run(self, take_over: bool) -> list[str]:
        try:
            state = self._team.from_leader(self._partial.start, take_over)
            finished: list[str] | None = state["finished"]
            if finished is not None:
                self._tell(
                    f"{self._destination} is finished: this command made it before. Nothing was "
                    "changed."
                )
                return finished
            self._do(state)
            return self._team.from_leader(self._partial.publish)
        except FilesError as error:
            self._clear_up(error)
            raise
        finally:
            self._partial.lock.release()

    def _do(self, state: dict[str, Any]) -> None:
        """Everything before the rename."""
        checksums: dict[int, dict[str, int]] = dict(state["units"])
        num_recorded = sum(self._task.units[number].num_bytes for number in checksums)
        if checksums:
            self._team.expect("check", num_recorded)
        if state["prepared"] is None:
            self._team.expect("count", self._work.bytes_to_prepare())
        self._team.expect("write", self._task.num_bytes, num_recorded)
        finished: set[int] = set()
        if checksums or state["num_lost"]:
            with self._timing("check"):
                finished = self._recheck(checksums, num_recorded)
            self._tell_resuming(finished, len(checksums) - len(finished) + state["num_lost"])
        with self._timing("count"):
            self._work.prepare(self._partial, state["prepared"])
        with self._timing("write"):
            self._write(finished, state["run"])
        peaks = torch.zeros(self._team.size, dtype=torch.int64)
        peaks[self._team.index] = peak_rss_bytes()
        run = RunFacts(
            num_ranks=self._team.size,
            seconds=self._seconds,
            peak_rss_bytes=self._team.sum(peaks).tolist(),
            num_bytes=self._task.num_bytes,
            versions=versions(),
        )
        self._team.from_leader(self._work.complete, self._partial, run)

    def _recheck(self, checksums: dict[int, dict[str, int]], num_bytes: int) -> set[int]:
        """The recorded units whose bytes are on the disk; the same on every rank."""
        numbered = [(number, self._task.units[number]) for number in checksums]
        mine = units_by_rank(numbered, self._team.size)[self._team.index]
        checker = Rechecker(self._task, self._partial.folder, self._work.sources)
        try:
            steps = checker.steps([(number, checksums[number]) for number in mine])
            self._team.begin("check", num_bytes)
            self._team.work(steps)
        finally:
            checker.close()
        damaged = torch.zeros(len(self._task.units), dtype=torch.int64)
        damaged[checker.damaged] = 1
        damaged = self._team.sum(damaged)
        return {number for number in checksums if not damaged[number]}

    def _tell_resuming(self, finished: set[int], num_damaged: int) -> None:
        num_bytes = sum(self._task.units[number].num_bytes for number in finished)
        self._tell(
            f"Resuming: {format_size(num_bytes)} of {format_size(self._task.num_bytes)} are "
            "finished."
        )
        if num_damaged:
            parts = "finished part is" if num_damaged == 1 else "finished parts are"
            self._tell(f"{num_damaged} {parts} missing or damaged and will be written again.")

    def _write(self, finished: set[int], run: int) -> None:
        missing = [(i, unit) for i, unit in enumerate(self._task.units) if i not in finished]
        mine = units_by_rank(missing, self._team.size)[self._team.index]
        sink = FileSink(self._partial.folder, self._task.tensors, self._task.layout)
        journal = Journal(
            self._partial.work, self._task.digest, run, self._team.index, sink.outputs
        )
        total = self._task.num_bytes
        num_finished = total - sum(unit.num_bytes for _, unit in missing)
        try:
            try:
                self._team.begin("write", total, num_finished)
                self._team.work(self._steps(mine, sink, journal))
            finally:
                # Record the finished units, whatever stopped the others; that error comes first.
                error = error_of(attempt(journal.flush))
            self._team.check(error)
        finally:
            sink.outputs.close()

    def _steps(self, mine: list[int], sink: FileSink, journal: Journal) -> Iterator[int]:
        folder, outputs = self._partial.folder, sink.outputs
        rewriter = Rewriter(self._work.elements(), sink)
        for number in mine:
            self._partial.lock.check()
            unit = self._task.units[number]
            outputs.take_checksums()
            record: dict[str, Any] = {"unit": number}
            if isinstance(unit, CopyUnit):
                output = str(folder / unit.name)
                yield from copy_range(
                    self._work.sources, unit.path, outputs, output, unit.start, unit.stop
                )
            else:
                yield from rewriter.rewrite(unit)
                record |= rewriter.record()
                record["crc32"] = {
                    str(Path(path).relative_to(folder)): checksum
                    for path, checksum in outputs.take_checksums().items()
                }
            journal.add(record, unit.num_bytes)

    def _clear_up(self, error: FilesError) -> None:
        """Remove what no run can use, and add to the error what is left."""
        is_lost = isinstance(error, RanksError)
        if not is_lost:  # wait until every rank has closed its files
            with contextlib.suppress(RanksError):
                self._team.check(None)
        if not self._team.is_leader:
            if is_lost and self._partial.folder.is_dir():
                error.say_more(self._partial.left())
            return
        if not self._partial.is_open:
            return
        if isinstance(error, (NaNError, SelectionError)):  # the same task would fail again
            self._partial.discard()
        elif not is_lost:
            self._partial.discard(only_if_empty=True)
        error.say_more(self._partial.left())

    @contextlib.contextmanager
    def _timing(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds[phase] = round(time.monotonic() - began, 3)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }
