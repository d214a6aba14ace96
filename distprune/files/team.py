"""The ranks of one run, in the words of this package: every rank raises, or none does."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from distprune._common.collectives import Communicator, Failed, attempt, error_of
from distprune.files.errors import (
    CheckpointError,
    FilesError,
    Interrupted,
    MachineError,
    NaNError,
    OutputError,
    RanksError,
    SelectionError,
    explained,
)

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
    )
}
# How long a rank works before it looks what the others do; a lost one is noticed then.
_ROUND_SECONDS = 0.5


# The rate that is shown is that of the last half minute.
_RATE_SECONDS = 30.0


@dataclass(frozen=True)
class Progress:
    """How far all ranks together are.

    Attributes:
        phase: "check" what is there, "count" or "write".
        num_bytes: done, of all phases, by this run and those before it.
        total_bytes: of all phases.
        bytes_per_second: of this run, lately.
    """

    phase: str
    num_bytes: int
    total_bytes: int
    bytes_per_second: float

    @property
    def seconds_left(self) -> float | None:
        """None as long as nothing is known."""
        rate = self.bytes_per_second
        return (self.total_bytes - self.num_bytes) / rate if rate else None


class Pace:
    """How fast something goes, lately.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()
        self._total = 0

    def begin(self) -> None:
        """Work starts now; the time since the last piece is not counted."""
        self._seen.clear()
        self._seen.append((self._clock(), self._total))

    def add(self, num_bytes: int) -> None:
        """So many bytes have been dealt with since the last call."""
        now = self._clock()
        self._total += num_bytes
        self._seen.append((now, self._total))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _RATE_SECONDS:
            self._seen.popleft()

    @property
    def bytes_per_second(self) -> float:
        (first, before), (last, after) = self._seen[0], self._seen[-1]
        return (after - before) / (last - first) if last > first else 0.0


class Team:
    """The ranks of one run.

    Args:
        communicator: of all of them.
        progress: called now and then, on this rank.
        stop: asked often; True on any rank stops all of them.
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
        return self.index == 0

    def sum(self, values: Tensor) -> Tensor:
        """Over all ranks, int64."""
        with _noticing_lost_ranks():
            return self._communicator.sum(values)

    def compare(self, facts: Sequence[tuple[str, str]]) -> None:
        """Raise RanksError, on every rank, if the ranks differ in a fact; names it."""
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
        failures = [each for each in texts if each]
        if failures:
            raise _unpacked(failures[0]) from error

    def attempt(self, function: Callable[..., T], *args: object) -> T:
        """Call on every rank; if it raises on one, raise that on all."""
        outcome = attempt(function, *args)
        self.check(error_of(outcome))
        assert not isinstance(outcome, Failed)  # check has raised
        return outcome

    def from_leader(self, function: Callable[..., T], *args: object) -> T:
        """Call on the leader, and give every rank its result, which has to be JSON."""
        result = attempt(function, *args) if self.is_leader else None
        self.check(error_of(result))
        if self.size == 1:
            return cast("T", result)  # the only rank is the leader
        with _noticing_lost_ranks():
            texts, _ = self._communicator.distinct_texts(
                json.dumps(result) if self.is_leader else ""
            )
        return json.loads(texts[0])

    def expect(self, phase: str, total_bytes: int, num_done: int = 0) -> None:
        """Say before it begins how much a phase will be, so that the progress is of the whole.

        Args:
            phase: as :meth:`work` is going to call it.
            total_bytes: of the phase, over all ranks.
            num_done: of these, by an earlier run.
        """
        self._totals[phase] = total_bytes
        self._done[phase] = num_done

    def gather(self, value: object) -> list[Any]:
        """The values of all ranks, in their order; each has to be JSON."""
        if self.size == 1:
            return [value]
        with _noticing_lost_ranks():
            texts, places = self._communicator.distinct_texts(json.dumps(value))
        return [json.loads(texts[place]) for place in places]

    def work(self, steps: Iterator[int], phase: str, num_done: int, total_bytes: int) -> None:
        """Run steps on every rank until all have finished.

        Args:
            steps: this rank's; each yields the bytes that it has dealt with.
            phase: for the progress.
            num_done: bytes of the phase that were done before, the same on every rank.
            total_bytes: of the phase, over all ranks.

        Raises:
            Interrupted: a rank was asked to stop; on every rank.
            Exception: the first failing rank's, on every rank.
        """
        self._pace.begin()
        self.expect(phase, total_bytes, num_done)
        before = 0
        mine, is_finished = 0, False
        error: BaseException | None = None
        while True:
            is_stopped = False
            until = time.monotonic() + _ROUND_SECONDS
            while not is_finished and time.monotonic() < until:
                is_stopped = self._stop()
                if is_stopped:
                    break
                step = attempt(next, steps, None)
                error = error_of(step)
                is_finished = not isinstance(step, int)
                mine += step if isinstance(step, int) else 0
            facts = [error is not None, is_stopped or self._stop(), not is_finished, mine]
            failed, stopped, unfinished, num_bytes = self.sum(
                torch.tensor(facts, dtype=torch.int64)
            ).tolist()
            if failed:
                self.check(error)
            if stopped:
                raise Interrupted("stopped as asked.")
            self._pace.add(num_bytes - before)
            before = num_bytes
            self._done[phase] = num_done + num_bytes
            if self._progress is not None:
                self._progress(self._state(phase))
            if not unfinished:
                return

    def _state(self, phase: str) -> Progress:
        done, total = sum(self._done.values()), sum(self._totals.values())
        return Progress(phase, done, total, self._pace.bytes_per_second)


def _packed(error: BaseException, rank: int) -> str:
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
    except RuntimeError as error:  # what torch.distributed raises, whatever the backend
        raise RanksError(
            f"a rank was lost, or did not answer in time ({error}). Run the same command again: it "
            "goes on where this one stopped."
        ) from error
