"""Faults at every point of a call: before, in and after each local step and each collective.

``Injector`` counts the points that a rank reaches, and calls a fault at one of them.
``run_doomed_ranks`` runs ranks that may die or stop, each in a process of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from distprune.ranks.collectives import Communicator

GROUP_TIMEOUT = 8.0  # seconds after which gloo gives up on a rank
# Until a rank of a doomed group is given up on. Machines may be busy.
DEADLINE = 90.0


class Injected(Exception):
    """The error that a fault raises."""


class Injector:
    """Calls a fault at one point of a call on this rank.

    Args:
        point: the number of the point; None: only count the points.
        fault: the function to call there; it may raise, kill or stop.
        kinds: what counts as a point: "before step", "after step", "before reduce",
            "after reduce".

    Attributes:
        reached: the kinds of the points so far.
        has_fired: whether the fault happened.
    """

    def __init__(
        self,
        point: int | None,
        fault: Callable[[], Any] | None = None,
        kinds: tuple[str, ...] = ("before step", "after step", "before reduce", "after reduce"),
    ) -> None:
        self.point = point
        self.fault = fault
        self.kinds = kinds
        self.reached: list[str] = []
        self.has_fired = False

    def reach(self, kind: str) -> None:
        if kind not in self.kinds:
            return
        self.reached.append(kind)
        if self.point == len(self.reached) - 1:
            self.has_fired = True
            assert self.fault is not None
            self.fault()

    @contextlib.contextmanager
    def active(self) -> Iterator[Injector]:
        def watched(step: Callable[..., Any]) -> Callable[..., Any]:
            def run_step(*args: Any) -> Any:
                self.reach("before step")
                result = step(*args)
                self.reach("after step")
                return result

            return run_step

        run, reduce, reduce_values = Communicator.run, Communicator.reduce, Communicator._reduce

        def watched_run(
            communicator: Communicator, step: Callable[..., Any], facts_of: Any = None
        ) -> Any:
            return run(communicator, watched(step), facts_of)

        def watched_reduce(
            communicator: Communicator, size: int, step: Callable[..., Any], *kind: Any
        ) -> Any:
            return reduce(communicator, size, watched(step), *kind)

        def watched_reduce_values(communicator: Communicator, values: torch.Tensor, op: Any) -> Any:
            self.reach("before reduce")
            reduced = reduce_values(communicator, values, op)
            self.reach("after reduce")
            return reduced

        with contextlib.ExitStack() as patches:
            for name, replacement in (
                ("run", watched_run),
                ("reduce", watched_reduce),
                ("_reduce", watched_reduce_values),
            ):
                patches.enter_context(mock.patch.object(Communicator, name, replacement))
            yield self


def raising(error: BaseException) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stop this process until it receives SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def run_doomed_ranks(
    fn: Callable[..., Any], world_size: int, doomed: int, *args: Any, is_stopped: bool = False
) -> tuple[dict[int, Any], float]:
    """Call ``fn(*args)`` on ranks, one of which may die, or stop until the others have answered.

    Args:
        fn: a function of a module; runs in a gloo group with a timeout of GROUP_TIMEOUT.
        doomed: the rank that may not answer.
        is_stopped: wake it when the others have answered, and wait for its answer.

    Returns:
        The results by rank, without ranks that died, and the seconds until the others answered.

    Raises:
        TimeoutError: a rank other than the doomed one did not answer.
    """
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="doomed") as folder:
        store = str(Path(folder, "store"))
        processes, pipes = [], []
        for rank in range(world_size):
            pipe, far_end = context.Pipe()
            process = context.Process(
                target=_answer, args=(far_end, rank, world_size, store, fn, args), daemon=True
            )
            process.start()
            far_end.close()
            processes.append(process)
            pipes.append(pipe)
        started = time.monotonic()
        try:
            answers = _collect({r: pipe for r, pipe in enumerate(pipes) if r != doomed})
            seconds = time.monotonic() - started
            stopped = processes[doomed].pid if is_stopped else None
            answers |= _collect({doomed: pipes[doomed]}, stopped)
        finally:
            for process in processes:
                process.kill()
                process.join()
    silent = [rank for rank in range(world_size) if rank not in answers and rank != doomed]
    if silent:
        raise TimeoutError(f"ranks {silent} did not answer")
    return answers, seconds


def _collect(pipes: dict[int, Connection], stopped: int | None = None) -> dict[int, Any]:
    """Collect answers by rank, without ranks that died; send SIGCONT to a stopped process."""
    answers, pending = {}, {pipe: rank for rank, pipe in pipes.items()}
    deadline = time.monotonic() + DEADLINE
    while pending and time.monotonic() < deadline:
        if stopped is not None:  # again and again: it may not have come to its stop yet
            os.kill(stopped, signal.SIGCONT)
        for pipe in wait(list(pending), 0.2):
            rank = pending.pop(pipe)
            with contextlib.suppress(EOFError, OSError):  # it died
                answers[rank] = pipe.recv()
    return answers


def _answer(
    pipe: Connection, rank: int, world_size: int, store: str, fn: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT),
    )
    dist.barrier()
    pipe.send(fn(*args))
    os._exit(0)  # threads of a broken group may wait for ever
