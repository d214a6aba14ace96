"""The ranks of one run, in the words of this package: every rank raises, or none does."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from distprune._common.collectives import Communicator, attempt
from distprune.files.errors import (
    CheckpointError,
    FilesError,
    Interrupted,
    NaNError,
    OutputError,
    RanksError,
    SelectionError,
)

T = TypeVar("T")

_KINDS = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        FilesError,
        Interrupted,
        NaNError,
        OutputError,
        RanksError,
        SelectionError,
    )
}
# How long a rank works before it looks what the others do; a lost one is noticed then.
_ROUND_SECONDS = 0.5


@dataclass(frozen=True)
class Progress:
    """How far all ranks together are.

    Attributes:
        phase: "count" or "write".
        num_bytes: done in this phase, over all ranks.
        total_bytes: of this phase.
        seconds: since the phase began.
    """

    phase: str
    num_bytes: int
    total_bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """None as long as nothing is known."""
        rate = self.bytes_per_second
        return (self.total_bytes - self.num_bytes) / rate if rate else None


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

    def check(self, error: Exception | None) -> None:
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
        result, error = attempt(function, *args)
        self.check(error)
        return result  # type: ignore[return-value]

    def from_leader(self, function: Callable[..., T], *args: object) -> T:
        """Call on the leader, and give every rank its result, which has to be JSON."""
        result, error = attempt(function, *args) if self.is_leader else (None, None)
        self.check(error)
        if self.size == 1:
            return result  # type: ignore[return-value]
        with _noticing_lost_ranks():
            texts, _ = self._communicator.distinct_texts(
                json.dumps(result) if self.is_leader else ""
            )
        return json.loads(texts[0])

    def work(self, steps: Iterator[int], phase: str, num_done: int, total_bytes: int) -> None:
        """Run steps on every rank until all have finished.

        Args:
            steps: this rank's; each yields the bytes that it has dealt with.
            phase: for the progress.
            num_done: bytes of an earlier run, the same on every rank.
            total_bytes: of the phase, over all ranks.

        Raises:
            Interrupted: a rank was asked to stop; on every rank.
            Exception: the first failing rank's, on every rank.
        """
        began = time.monotonic()
        mine, is_finished = 0, False
        error: Exception | None = None
        while True:
            is_stopped = False
            until = time.monotonic() + _ROUND_SECONDS
            while not is_finished and time.monotonic() < until:
                is_stopped = self._stop()
                if is_stopped:
                    break
                step, error = attempt(next, steps, None)
                is_finished = step is None
                mine += step or 0
            facts = [error is not None, is_stopped or self._stop(), not is_finished, mine]
            failed, stopped, unfinished, num_bytes = self.sum(
                torch.tensor(facts, dtype=torch.int64)
            ).tolist()
            if failed:
                self.check(error)
            if stopped:
                raise Interrupted("stopped as asked; run the same command again to go on.")
            if self._progress is not None:
                seconds = time.monotonic() - began
                self._progress(Progress(phase, num_done + num_bytes, total_bytes, seconds))
            if not unfinished:
                return


def _packed(error: Exception, rank: int) -> str:
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
