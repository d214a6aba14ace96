"""The ranks of one run: they share work and progress, and all of them raise, or none does."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from distprune.files import errors
from distprune.files.errors import RanksError, explained
from distprune.ranks.collectives import Communicator, Op

T = TypeVar("T")

# A rank works so long before the ranks exchange progress and errors.
_ROUND_SECONDS = 0.5


@dataclass(frozen=True)
class Progress:
    """The progress of all ranks together.

    Attributes:
        phase: "count", "write" or "verify".
        num_bytes: finished bytes of the phase, by this run and earlier ones; an estimate while
            the ranks count, each of which reads about as much.
        total_bytes: of the phase.
    """

    phase: str
    num_bytes: int
    total_bytes: int


class Team(Communicator):
    """The ranks of one run, with errors of ``distprune.files``.

    Args:
        communicator: of all ranks.
        progress: called about twice a second, on this rank.

    Attributes:
        is_leader: whether this is rank 0, which alone changes folders.
    """

    def __init__(
        self, communicator: Communicator, progress: Callable[[Progress], None] | None = None
    ) -> None:
        super().__init__((), communicator.ranks, communicator.rank)
        self.is_leader = self.index == 0
        self._communicator = communicator
        self._progress = progress or (lambda state: None)
        self._state = Progress("", 0, 0)
        self._shown_at = 0.0

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

    def from_leader(self, function: Callable[[], T]) -> T:
        """Call a function on the leader; every rank returns its result, which must be JSON."""
        if self.size == 1:
            return function()
        packed = self.run(lambda: json.dumps(function()) if self.is_leader else "")
        shared: T = json.loads(self.distinct_texts(packed)[0][0])
        return shared

    def share(self, value: object) -> list[Any]:
        """The values of all ranks, in order of rank; each must be JSON."""
        if self.size == 1:
            return [value]
        texts, indices = self.distinct_texts(json.dumps(value))
        return [json.loads(texts[index]) for index in indices]

    def begin(self, phase: str, total_bytes: int, num_done: int = 0) -> None:
        """Begin a phase of the progress.

        Args:
            phase: its name.
            total_bytes: of the phase, over all ranks; about.
            num_done: bytes that an earlier run has finished.
        """
        self._state = Progress(phase, num_done, total_bytes)

    def count(self, num_bytes: int) -> None:
        """Note bytes that this rank has read; they are progress in the phase "count"."""
        if self._state.phase == "count":
            self._add(num_bytes * self.size)

    def work(self, steps: Iterator[int]) -> None:
        """Run steps on every rank until all have finished; each yields a number of bytes.

        Raises:
            Exception: the error of the first rank that failed; on every rank.

        Cost: two all-reduces of up to 40 bytes twice a second.
        """
        is_unfinished = True
        while is_unfinished:
            error, num_bytes, is_mine_unfinished = None, 0, 0
            end = time.monotonic() + _ROUND_SECONDS
            try:
                for step in steps:
                    num_bytes += step
                    if time.monotonic() >= end:
                        is_mine_unfinished = 1
                        break
            except Exception as caught:  # of any type: every rank is to raise it
                error = caught
            facts = torch.tensor([int(error is not None), is_mine_unfinished, num_bytes])
            failed, is_unfinished, num_bytes = self.sum(facts).tolist()
            if failed:
                self._raise_everywhere(error)
            self.run(functools.partial(self._add, num_bytes))

    def _add(self, num_bytes: int) -> None:
        state, now = self._state, time.monotonic()
        done = min(state.num_bytes + num_bytes, state.total_bytes)
        self._state = Progress(state.phase, done, state.total_bytes)
        if now >= self._shown_at + _ROUND_SECONDS or done == state.total_bytes:
            self._shown_at = now
            self._progress(self._state)

    def _raise_everywhere(self, error: BaseException | None) -> NoReturn:
        """Raise the error of the first rank that has one, with its type."""
        if self.size == 1 or not isinstance(error, Exception | None):
            assert error is not None
            raise error
        texts, _ = self.distinct_texts("" if error is None else _packed(error, self.index))
        kind, message = json.loads(next(text for text in texts if text))
        raise getattr(errors, kind)(message) from error

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


def _packed(error: BaseException, rank: int) -> str:
    """An error as text that other ranks can raise."""
    known = explained(error)
    kind = "FilesError" if known is None else type(known).__name__
    text = f"{type(error).__name__}: {error}" if known is None else str(known)
    return json.dumps([kind, f"on rank {rank}: {text}"])
