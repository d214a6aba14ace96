"""The ranks of one run: they share work and progress, and all of them raise, or none does."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from distprune.files import errors
from distprune.files.errors import FilesError, Interrupted, RanksError, explained
from distprune.ranks.collectives import Communicator, Op

P = ParamSpec("P")
T = TypeVar("T")

# A rank works so long before it communicates; then it also notices a lost rank.
_ROUND_SECONDS = 0.5

_RATE_SECONDS = 30.0  # the displayed rate is that of the last half minute


@dataclass(frozen=True)
class Progress:
    """The progress of all ranks together.

    Attributes:
        phase: "count", "write" or "verify".
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


class Team(Communicator):
    """The ranks of one run, with errors of ``distprune.files``.

    Args:
        communicator: of all ranks.
        progress: called about twice a second, on this rank.
        stop: called often; if it returns True on any rank, all of them stop.

    Attributes:
        is_leader: whether this is rank 0, which alone changes folders.
    """

    def __init__(
        self,
        communicator: Communicator,
        progress: Callable[[Progress], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__((), communicator.ranks, communicator.rank)
        self.is_leader = self.index == 0
        self._communicator = communicator
        self._progress = progress
        self._stop = stop or (lambda: False)
        self._samples: deque[tuple[float, int]] = deque()  # of the rate: when, and bytes by then
        self._totals: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._phase = ""
        self._mine = 0  # bytes of the phase that this rank has processed
        self._shared = 0  # and all ranks, when they last communicated
        self._until: float | None = None  # when to communicate next; None: not at work
        self._error_of_progress: BaseException | None = None

    def shares(self, sizes: Sequence[int]) -> Iterator[range]:
        """What this rank counts of some tensors: one run of all elements, so that reads go on."""
        total, offset = sum(sizes), 0
        first, last = total * self.index // self.size, total * (self.index + 1) // self.size
        for size in sizes:
            start = min(max(first - offset, 0), size)
            yield range(start, max(start, min(last - offset, size)))
            offset += size

    def compare(self, facts: Sequence[tuple[str, str]]) -> None:
        """Raise RanksError on every rank if the ranks differ in a fact; names the fact."""
        try:
            self.agree(facts)
        except ValueError as error:
            raise RanksError(str(error)) from error

    def check(self, error: BaseException | None) -> None:
        """Raise the error of the first rank that has one, on every rank."""
        if self.size == 1:
            if error is not None:
                raise error
            return
        texts, _ = self.distinct_texts("" if error is None else _packed(error, self.index))
        if failures := [text for text in texts if text]:
            raise _unpacked(failures[0]) from error

    def attempt(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on every rank; if it raises on one, all ranks raise its error."""
        error: Exception | None = None
        try:
            result = function(*args, **kwargs)
        except Exception as caught:  # of any type: every rank is to raise it
            error = caught
        self.check(error)
        return result

    def from_leader(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on the leader; every rank returns its result, which must be JSON."""
        if self.size == 1:
            return function(*args, **kwargs)
        packed = self.attempt(
            lambda: json.dumps(function(*args, **kwargs)) if self.is_leader else ""
        )
        shared: T = json.loads(self.distinct_texts(packed)[0][0])
        return shared

    def share(self, value: object) -> list[Any]:
        """The values of all ranks, in order of rank; each must be JSON."""
        if self.size == 1:
            return [value]
        texts, indices = self.distinct_texts(json.dumps(value))
        return [json.loads(texts[index]) for index in indices]

    def expect(self, phase: str, total_bytes: int, num_done: int = 0) -> None:
        """Announce a phase, so that the progress covers all phases from the beginning.

        Args:
            phase: the name that :meth:`begin` will be called with.
            total_bytes: of the phase, over all ranks.
            num_done: bytes that an earlier run has finished.
        """
        self._totals[phase] = total_bytes
        self._done[phase] = num_done

    def begin(self, phase: str, total_bytes: int, num_done: int = 0) -> None:
        """Begin a phase: the bytes of :meth:`did` are of it from now on.

        Args:
            phase: for the progress.
            total_bytes: of the phase, over all ranks; about.
            num_done: bytes that an earlier run has finished, the same on every rank.
        """
        if self._phase:
            self._done[self._phase] = self._totals[self._phase]
        self.expect(phase, total_bytes, num_done)
        self._phase, self._mine, self._shared = phase, 0, 0
        self._samples = deque([(time.monotonic(), 0)])  # the time since the last phase is not in it

    def did(self, num_bytes: int) -> None:
        """Report bytes that this rank has processed, often: all ranks communicate now and then.

        Raises:
            Interrupted: ``stop`` returned True on a rank; on every rank.
            FilesError: of another rank that failed.
        """
        self._mine += num_bytes
        if self._until is not None and (self._stop() or time.monotonic() >= self._until):
            self._communicate(None, is_finished=False)
            self._until = time.monotonic() + _ROUND_SECONDS
            if self._error_of_progress is not None:
                raise self._error_of_progress

    def did_count(self, num_bytes: int) -> None:
        """:meth:`did`, where bytes that are read in another phase than "count" are no progress."""
        self.did(num_bytes if self._phase == "count" else 0)

    def work(self, steps: Iterator[int]) -> None:
        """Run steps on every rank until all have finished; each yields bytes for :meth:`did`.

        Raises:
            Interrupted: ``stop`` returned True on a rank; on every rank.
            Exception: the error of the first rank that failed, in a step, in ``progress`` or in
                ``stop``; on every rank.
        """
        with self._at_work():
            for num_bytes in steps:
                self.did(num_bytes)

    def reduce(self, size: int, step: Callable[[], Tensor], op: Op = "sum") -> Tensor:
        """Run a local step on every rank, which may call :meth:`did`, and reduce what it returns.

        Raises:
            as :meth:`work`.
        """
        with self._at_work():
            values = step()
        return self._reduce(values, op)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Communicate until all ranks have finished a block; if one raised, all raise its error."""
        self._until = time.monotonic() + _ROUND_SECONDS
        error: BaseException | None = None
        try:
            yield
        except Exception as caught:  # of any type: every rank is to raise it
            if self._until is None:  # all ranks have raised already
                raise
            error = caught
        is_unfinished = True
        while is_unfinished:
            is_unfinished = self._communicate(error, is_finished=True)
            error = self._error_of_progress
        self._until = None
        self.check(error)

    def _communicate(self, error: BaseException | None, *, is_finished: bool) -> bool:
        """Share errors, stops and progress; whether a rank is still at work.

        An error of ``progress`` is told in the next round.
        """
        is_stopped = False
        try:
            is_stopped = self._stop()
        except Exception as caught:
            error = error or caught
        facts = [error is not None, is_stopped is True, not is_finished, self._mine]
        until, self._until = self._until, None  # if this raises, all ranks have raised
        shared = self._reduce(torch.tensor(facts, dtype=torch.int64), "sum").tolist()
        failed, stopped, unfinished, num_bytes = shared
        if failed:
            self.check(error)
        if stopped:
            raise Interrupted("stopped as asked.")
        self._until = until
        self._error_of_progress = None
        if self._phase:
            self._shared, now = num_bytes, time.monotonic()
            self._samples.append((now, num_bytes))
            while len(self._samples) > 2 and self._samples[1][0] <= now - _RATE_SECONDS:
                self._samples.popleft()
            try:
                if self._progress is not None:
                    self._progress(self._state())
            except Exception as caught:
                self._error_of_progress = caught
        return bool(unfinished)

    def _reduce(self, values: Tensor, op: Op) -> Tensor:
        if self.size == 1:
            return values
        try:
            return self._communicator._reduce(values, op)
        except RuntimeError as error:  # of torch.distributed, with any backend
            raise RanksError(
                f"a rank was lost, or did not answer in time ({error}). Run the same command "
                "again: it resumes where this one stopped."
            ) from error

    def _state(self) -> Progress:
        total = self._totals[self._phase]
        done = sum(self._done.values()) + min(self._shared, total - self._done[self._phase])
        (start, first), (end, last) = self._samples[0], self._samples[-1]
        rate = (last - first) / (end - start) if end > start else 0.0
        return Progress(self._phase, done, sum(self._totals.values()), rate)


def _packed(error: BaseException, rank: int) -> str:
    """An error as text that other ranks can raise."""
    error = explained(error) or error
    if isinstance(error, FilesError):
        return json.dumps(
            [type(error).__name__, f"on rank {rank}: {error.headline}", error.problems]
        )
    return json.dumps(["FilesError", f"on rank {rank}: {type(error).__name__}: {error}", []])


def _unpacked(text: str) -> FilesError:
    kind, headline, problems = json.loads(text)
    error: FilesError = getattr(errors, kind)(headline, problems)
    return error
