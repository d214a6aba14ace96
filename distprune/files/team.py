"""The ranks of one run: they share work and progress, and all of them raise, or none does."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from distprune._common.attempts import Failed, attempt, error_of
from distprune._common.collectives import Communicator
from distprune.files.errors import (
    CheckpointError,
    FilesError,
    Interrupted,
    MachineError,
    NaNError,
    OutputError,
    RanksError,
    SelectionError,
    TextError,
    explained,
)

P = ParamSpec("P")
T = TypeVar("T")

_KINDS = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        FilesError,
        Interrupted,
        MachineError,
        NaNError,
        OutputError,
        RanksError,
        SelectionError,
        TextError,
    )
}
# A rank works so long before it communicates; then it also notices a lost rank.
_ROUND_SECONDS = 0.5

_RATE_SECONDS = 30.0  # the displayed rate is that of the last half minute


@dataclass(frozen=True)
class Progress:
    """The progress of all ranks together.

    Attributes:
        phase: "check", "count", "write" or "verify".
        num_bytes: finished bytes of all phases, by this run and earlier ones.
        total_bytes: of all phases.
        bytes_per_second: of this run in the last half minute.
    """

    phase: str
    num_bytes: int
    total_bytes: int
    bytes_per_second: float

    @property
    def seconds_left(self) -> float | None:
        """The estimated time left; None until a rate is known."""
        rate = self.bytes_per_second
        return (self.total_bytes - self.num_bytes) / rate if rate else None


class Pace:
    """The rate of some work in the last half minute.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()
        self._total = 0

    def begin(self) -> None:
        """Start to measure: the time since the last piece does not count."""
        self._samples.clear()
        self._samples.append((self._clock(), self._total))

    def add(self, num_bytes: int) -> None:
        """Count bytes that were processed since the last call."""
        now = self._clock()
        self._total += num_bytes
        self._samples.append((now, self._total))
        while len(self._samples) > 2 and self._samples[1][0] <= now - _RATE_SECONDS:
            self._samples.popleft()

    @property
    def bytes_per_second(self) -> float:
        """The rate; 0.0 until it is known."""
        (start, first_total), (end, last_total) = self._samples[0], self._samples[-1]
        return (last_total - first_total) / (end - start) if end > start else 0.0


class Team:
    """The ranks of one run.

    Args:
        communicator: of all ranks.
        progress: called about twice a second, on this rank.
        stop: called often; if it returns True on any rank, all of them stop.
    """

    def __init__(
        self,
        communicator: Communicator,
        progress: Callable[[Progress], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self.size = communicator.size
        self.index = communicator.index
        self._communicator = communicator
        self._progress = progress
        self._stop = stop or (lambda: False)
        self._pace = Pace()
        self._totals: dict[str, int] = {}
        self._done: dict[str, int] = {}

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which alone changes folders."""
        return self.index == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, int64."""
        with _noticing_lost_ranks():
            return self._communicator.sum(values)

    def max(self, values: Tensor) -> Tensor:
        """The elementwise maximum over all ranks, int64."""
        with _noticing_lost_ranks():
            return self._communicator.max(values)

    def compare(self, facts: Sequence[tuple[str, str]]) -> None:
        """Raise RanksError on every rank if the ranks differ in a fact; names the fact."""
        with _noticing_lost_ranks():
            try:
                self._communicator.agree(facts)
            except ValueError as error:
                raise RanksError(str(error)) from error

    def check(self, error: BaseException | None) -> None:
        """Raise the error of the first rank that has one, on every rank."""
        if self.size == 1:
            if error is not None:
                raise error
            return
        text = "" if error is None else _packed(error, self.index)
        with _noticing_lost_ranks():
            texts, _ = self._communicator.distinct_texts(text)
        failures = [text for text in texts if text]
        if failures:
            raise _unpacked(failures[0]) from error

    def attempt(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on every rank; if it raises on one, all ranks raise its error."""
        outcome = attempt(function, *args, **kwargs)
        self.check(error_of(outcome))
        assert not isinstance(outcome, Failed)  # check has raised
        return outcome

    def from_leader(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on the leader; every rank returns its result, which must be JSON."""
        result = attempt(function, *args, **kwargs) if self.is_leader else None
        self.check(error_of(result))
        if self.size == 1:
            return cast("T", result)  # the only rank is the leader
        with _noticing_lost_ranks():
            texts, _ = self._communicator.distinct_texts(
                json.dumps(result) if self.is_leader else ""
            )
        shared: T = json.loads(texts[0])
        return shared

    def expect(self, phase: str, total_bytes: int, num_done: int = 0) -> None:
        """Announce a phase, so that the progress covers all phases from the beginning.

        Args:
            phase: the name that :meth:`work` will be called with.
            total_bytes: of the phase, over all ranks.
            num_done: bytes that an earlier run has finished.
        """
        self._totals[phase] = total_bytes
        self._done[phase] = num_done

    def gather(self, value: object) -> list[Any]:
        """The values of all ranks, in order of rank; each must be JSON."""
        if self.size == 1:
            return [value]
        with _noticing_lost_ranks():
            texts, indices = self._communicator.distinct_texts(json.dumps(value))
        return [json.loads(texts[index]) for index in indices]

    def work(self, steps: Iterator[int], phase: str, num_done: int, total_bytes: int) -> None:
        """Run steps on every rank until all have finished.

        Args:
            steps: of this rank; each yields the number of bytes that it has processed.
            phase: for the progress.
            num_done: bytes of the phase that an earlier run has finished, the same on every rank.
            total_bytes: of the phase, over all ranks.

        Raises:
            Interrupted: ``stop`` returned True on a rank; on every rank.
            Exception: the error of the first rank that failed, in a step, in ``progress`` or in
                ``stop``; on every rank.
        """
        self._pace.begin()
        self.expect(phase, total_bytes, num_done)
        previous_bytes = 0
        mine, is_finished, is_stopped = 0, False, False

        def advance() -> None:
            nonlocal mine, is_finished, is_stopped
            until = time.monotonic() + _ROUND_SECONDS
            while True:
                is_stopped = self._stop()
                if is_stopped or is_finished or time.monotonic() >= until:
                    return
                step = next(steps, None)
                is_finished = step is None
                mine += step or 0

        error: BaseException | None = None
        while True:
            error = error or error_of(attempt(advance))
            facts = [error is not None, is_stopped, not is_finished, mine]
            failed, stopped, unfinished, num_bytes = self.sum(
                torch.tensor(facts, dtype=torch.int64)
            ).tolist()
            if failed:
                self.check(error)
            if stopped:
                raise Interrupted("stopped as asked.")
            self._pace.add(num_bytes - previous_bytes)
            previous_bytes = num_bytes
            self._done[phase] = num_done + num_bytes
            if self._progress is not None:
                error = error_of(attempt(self._progress, self._state(phase)))
            if not unfinished:
                self.check(error)
                return

    def _state(self, phase: str) -> Progress:
        done, total = sum(self._done.values()), sum(self._totals.values())
        return Progress(phase, done, total, self._pace.bytes_per_second)


def _packed(error: BaseException, rank: int) -> str:
    """An error as text that other ranks can raise."""
    error = explained(error) or error
    kind = type(error).__name__ if isinstance(error, FilesError) else FilesError.__name__
    headline = (
        error.headline if isinstance(error, FilesError) else f"{type(error).__name__}: {error}"
    )
    problems = error.problems if isinstance(error, FilesError) else ()
    return json.dumps([kind, f"on rank {rank}: {headline}", problems])


def _unpacked(text: str) -> FilesError:
    kind, headline, problems = json.loads(text)
    return _KINDS[kind](headline, problems)


@contextlib.contextmanager
def _noticing_lost_ranks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of torch.distributed, with any backend
        raise RanksError(
            f"a rank was lost, or did not answer in time ({error}). Run the same command again: it "
            "resumes where this one stopped."
        ) from error
