"""The ranks of one run: they share work and progress, and all of them raise, or none does."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch.distributed as dist
from torch import Tensor

from distprune.files import errors
from distprune.files.errors import RanksError, explained, translated
from distprune.ranks.collectives import Communicator, Op, end_groups, world

T = TypeVar("T")

_SECONDS = 0.5  # between reports of progress


class Progress(NamedTuple):
    """How far a run has come.

    Attributes:
        phase: what is under way: "read", "count", "write" or "verify" of files, by what this rank
            has done, because all ranks do about as much; "evaluate", "calibrate", "write", "prune"
            or "polish" of a language model, the same on every rank.
        num_done: how many units are finished, by all ranks together, in earlier runs too.
        total: units of the phase.
        unit: what is counted: "bytes"; "windows"; "steps"; or "forwards of a layer", of one window
            each, where a model is streamed and its passes take unequally long.
    """

    phase: str
    num_done: int
    total: int
    unit: str = "bytes"


class Team(Communicator):
    """The ranks of one run, with errors of ``distprune.files``.

    Args:
        communicator: of all ranks.
        progress: called about twice a second, on this rank.

    Attributes:
        is_leader: whether this is rank 0, which alone changes folders.
    """

    def __init__(
        self, communicator: Communicator, progress: Callable[[Progress], object] | None = None
    ) -> None:
        own = communicator
        super().__init__(own._groups, own.ranks, own.rank, own._device)
        self.is_leader = self.index == 0
        self._progress = progress or (lambda state: None)
        self._state = Progress("", 0, 0)
        self._shown_at, self._lock = 0.0, threading.Lock()

    def compare(self, facts: Sequence[tuple[str, str]]) -> None:
        """Raise RanksError on every rank if the ranks differ in a fact; names the fact."""
        with translated(RanksError):
            self.agree(facts)

    def from_leader(self, function: Callable[[], T]) -> T:
        """Call a function on the leader; every rank returns its result, which must be JSON."""
        return self.share(self.run(lambda: function() if self.is_leader else None))[0]

    def share(self, value: object) -> list[Any]:
        """The values of all ranks, in order of rank; each must be JSON."""
        if self.size == 1:
            return [value]
        texts, indices = self.distinct_texts(json.dumps(value))
        return [json.loads(texts[index]) for index in indices]

    def each(self, sizes: dict[str, int], step: Callable[[str], None]) -> None:
        """Call a local step for each file, the largest first; the ranks share them. Collective.

        Args:
            sizes: by name, what a file takes.
            step: from the name; if it fails on one rank, every rank raises the error when its own
                file is finished.

        Cost: an all-reduce of 40 bytes for as many files as there are ranks.
        """
        names = sorted(sizes, key=lambda name: (-sizes[name], name))
        for start in range(0, len(names), self.size):
            own = names[start : start + self.size][self.index : self.index + 1]
            self.run(partial(list, map(step, own)))

    def begin(self, phase: str, total_bytes: int, num_done: int = 0) -> None:
        """Begin a phase of the progress.

        Args:
            phase: its name.
            total_bytes: of the phase, over all ranks; about.
            num_done: bytes that an earlier run has finished.
        """
        self._state = Progress(phase, num_done, total_bytes)

    def count(self, phase: str, num_bytes: int) -> None:
        """Note bytes that this rank has done of a phase; the other ranks do about as much."""
        with self._lock:  # several threads read
            state, now = self._state, time.monotonic()
            if phase != state.phase:
                return
            done = min(state.num_done + num_bytes * self.size, state.total)
            self._state = state._replace(num_done=done)
            if now >= self._shown_at + _SECONDS or done == state.total:
                self._shown_at = now
                self._progress(self._state)

    def _raise_everywhere(self, error: BaseException | None) -> NoReturn:
        """Raise the error of the first rank that has one, with its type."""
        if self.size == 1 or not isinstance(error, Exception | None):
            assert error is not None
            raise error
        packed = ""
        if error is not None:
            known = explained(error)
            text = f"{type(error).__name__}: {error}" if known is None else str(known)
            kind = "FilesError" if known is None else type(known).__name__
            packed = json.dumps([kind, f"on rank {self.index}: {text}"])
        texts, _ = self.distinct_texts(packed)
        kind, text = json.loads(next(text for text in texts if text))
        raise getattr(errors, kind)(text) from error

    def _reduce(self, values: Tensor, op: Op) -> Tensor:
        try:
            return super()._reduce(values, op)
        except RuntimeError as error:  # of torch.distributed, with any backend
            raise RanksError(
                f"a rank was lost, or did not answer in time ({error}). Run the same command "
                "again: it resumes where this one stopped."
            ) from error


@contextlib.contextmanager
def process_group(timeout: float, backend: str = "gloo") -> Iterator[Team]:
    """Join the other ranks of torchrun, if there are any. Yields all of them."""
    try:
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (ValueError, RuntimeError) as error:
        raise RanksError(f"could not initialise the process group: {error}") from error
    team = Team(world())
    yield team
    if "RANK" in os.environ:  # after an error the process ends
        team._groups = ()
        end_groups()
