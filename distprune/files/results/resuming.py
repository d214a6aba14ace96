"""Work in units that any number of ranks share, and that goes on after any interruption.

[Note: resume] Units depend on the task alone. A unit that was done is noted once its bytes are on
the disk, with their checksum; before a run goes on, all that was noted is compared with the disk.
What was not noted, or is damaged, is done from the source, which is never changed. So whatever was
interrupted, and with whatever number of ranks it goes on, the bytes are the same.
"""

from __future__ import annotations

import contextlib
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from distprune._common.collectives import attempt, error_of
from distprune.files.disk.journal import Journal
from distprune.files.disk.open_files import OpenFiles, copy_range
from distprune.files.errors import FilesError, NaNError, RanksError, SelectionError, format_size
from distprune.files.ranking.units import CopyUnit, SpanUnit, units_by_rank
from distprune.files.reports.report import RunFacts
from distprune.files.results.partial import Partial
from distprune.files.results.rechecking import Rechecker
from distprune.files.results.task import Task
from distprune.files.team import Team


class Worker(Protocol):
    """Rewrites units of tensors, one after the other."""

    outputs: OpenFiles

    def rewrite(self, number: int, unit: SpanUnit) -> Iterator[int]:
        """Do a unit; yields bytes."""
        ...

    def record(self) -> dict[str, Any]:
        """The counts of the last unit for the report, as JSON."""
        ...


class Work(Protocol):
    """What is made; the same on every rank, and called on all of them together."""

    @property
    def sources(self) -> OpenFiles:
        """Files of the source."""
        ...

    def bytes_to_prepare(self) -> int:
        """What :meth:`prepare` will deal with, if nothing was prepared; for the progress."""
        ...

    def prepare(self, partial: Partial, prepared: Any) -> None:
        """Find out what all units need; ``prepared`` is what an earlier run kept, or None."""
        ...

    def worker(self, folder: Path) -> Worker:
        """Of this rank."""
        ...

    def complete(self, partial: Partial, run: RunFacts) -> None:
        """Write the report; on the leader alone."""
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
    """Make a result, or what is left of it to do.

    Args:
        team: the ranks that share the work.
        task: what to make.
        work: how to make it.
        destination: absolute.
        take_over: see ``Lock.acquire``.
        tell: is given sentences for the user.

    Returns:
        The texts of the report and of its run.

    Raises:
        FilesError: of any kind; on every rank, with what is left on the disk in its text.
    """
    return _CarryingOut(team, task, work, destination, tell or (lambda text: None)).run(take_over)


class _CarryingOut:
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
            if state["finished"] is not None:
                self._tell(
                    f"{self._destination} is finished: this command made it before. Nothing was "
                    "changed."
                )
                return state["finished"]
            self._do(state)
            return self._team.from_leader(self._partial.publish)
        except FilesError as error:
            self._clear_up(error)
            raise
        finally:
            self._partial.lock.release()

    def _do(self, state: dict[str, Any]) -> None:
        """All that comes before the rename."""
        noted = [(number, checksums) for number, checksums in state["done"]]
        num_noted = sum(self._task.units[number].num_bytes for number, _ in noted)
        if noted:
            self._team.expect("check", num_noted)
        if state["prepared"] is None:
            self._team.expect("count", self._work.bytes_to_prepare())
        self._team.expect("write", self._task.num_bytes, num_noted)
        done = set()
        if noted or state["num_lost"]:
            with self._timing("check"):
                done = self._recheck(noted, num_noted)
            self._say_resuming(done, len(noted) - len(done) + state["num_lost"])
        with self._timing("count"):
            self._work.prepare(self._partial, state["prepared"])
        with self._timing("write"):
            self._write(done, state["run"])
        peaks = torch.zeros(self._team.size, dtype=torch.int64)
        peaks[self._team.index] = _peak_rss_bytes()
        run = RunFacts(
            num_ranks=self._team.size,
            seconds=self._seconds,
            peak_rss_bytes=self._team.sum(peaks).tolist(),
            num_bytes=self._task.num_bytes,
            versions=versions(),
        )
        self._team.from_leader(self._work.complete, self._partial, run)

    def _recheck(self, noted: list[tuple[int, dict[str, int]]], num_bytes: int) -> set[int]:
        """Units that are on the disk as they were written; the same on every rank."""
        checksums = dict(noted)
        numbered = [(number, self._task.units[number]) for number in checksums]
        mine = units_by_rank(numbered, self._team.size)[self._team.index]
        checker = Rechecker(self._task, self._partial.folder, self._work.sources)
        try:
            steps = checker.steps([(number, checksums[number]) for number in mine])
            self._team.work(steps, "check", 0, num_bytes)
        finally:
            checker.close()
        damaged = torch.zeros(len(self._task.units), dtype=torch.int64)
        damaged[checker.damaged] = 1
        damaged = self._team.sum(damaged)
        return {number for number in checksums if not damaged[number]}

    def _say_resuming(self, done: set[int], num_damaged: int) -> None:
        num_bytes = sum(self._task.units[number].num_bytes for number in done)
        self._tell(
            f"Going on: {format_size(num_bytes)} of {format_size(self._task.num_bytes)} are done "
            "already."
        )
        if num_damaged:
            what = "part" if num_damaged == 1 else "parts"
            self._tell(
                f"{num_damaged} {what} of it that had been done before are gone or damaged, and "
                "are done again."
            )

    def _write(self, done: set[int], run: int) -> None:
        left = [(i, unit) for i, unit in enumerate(self._task.units) if i not in done]
        mine = units_by_rank(left, self._team.size)[self._team.index]
        worker = self._work.worker(self._partial.folder)
        journal = Journal(
            self._partial.work, self._task.digest, run, self._team.index, worker.outputs
        )
        total = self._task.num_bytes
        num_done = total - sum(unit.num_bytes for _, unit in left)
        try:
            try:
                self._team.work(self._steps(mine, worker, journal), "write", num_done, total)
            finally:
                # What is done counts, whatever stopped the rest; an error here comes second.
                error = error_of(attempt(journal.flush))
            self._team.check(error)
        finally:
            worker.outputs.close()

    def _steps(self, mine: list[int], worker: Worker, journal: Journal) -> Iterator[int]:
        folder = self._partial.folder
        for number in mine:
            self._partial.lock.check()
            unit = self._task.units[number]
            worker.outputs.take_checksums()
            record: dict[str, Any] = {"unit": number}
            if isinstance(unit, CopyUnit):
                output = str(folder / unit.name)
                yield from copy_range(
                    self._work.sources, unit.path, worker.outputs, output, unit.start, unit.stop
                )
            else:
                yield from worker.rewrite(number, unit)
                record |= worker.record()
                record["crc32"] = {
                    str(Path(path).relative_to(folder)): checksum
                    for path, checksum in worker.outputs.take_checksums().items()
                }
            journal.add(record, unit.num_bytes)

    def _clear_up(self, error: FilesError) -> None:
        """Remove what no run could use, and say in the error what is left."""
        is_lost = isinstance(error, RanksError)
        if not is_lost:  # until every rank has closed its files
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
    """Of what computes here."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
