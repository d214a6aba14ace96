"""A fault on one rank, at any point of a pruning: every rank raises, and nothing has changed.

Points are before and after every local step and every collective of the call. A rank *raises*
(out of memory, an interrupt, ...) in a step; its network *fails*; it is *killed*; or it is
*stopped* until the others have given up.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import distprune as prune
from distprune.ranks.collectives import Communicator
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong_on, changes, snapshot, wrong_masks
from helpers.models import Net, fill, target
from helpers.sampling import THOROUGH, every

NAMES = ["l1.weight", "l2.weight", "l2.bias", "l3.weight"]
STEPS = ("before step", "after step")
WRAPPINGS = ["plain-2", "ddp-2", "fsdp1-2", "fsdp2-2", "tp-2", "fsdp2_tp-2x2", "hsdp-2x2"]
# All points of all wrappings take half an hour; some are taken, and all of them if asked to.
ALL_POINTS = bool(os.environ.get("DISTPRUNE_ALL_FAULTS"))
GROUP_TIMEOUT = 8.0  # seconds after which gloo gives up on a rank
DEADLINE = 90.0  # until a rank of a doomed group is given up on: machines may be busy
METHODS = {
    "l1": (prune.L1Unstructured, {"amount": 0.5}),
    "bounded": (prune.L1Unstructured, {"amount": 0.5, "min_sparsity": 0.4, "max_sparsity": 0.75}),
    "random": (prune.RandomUnstructured, {"amount": 0.5}),
    "ties": (prune.L1Unstructured, {"amount": 0.5}),
    "rows": (prune.L1Unstructured, {"scope": "row", "amount": 0.5}),  # which tp-2 cuts
}


class Injected(Exception):
    """The error that a fault raises."""


ERRORS = {
    "memory": MemoryError("no room"),
    "odd text": Injected("a name with a lone surrogate: \udcff"),
    "interrupt": KeyboardInterrupt(),
    "exit": SystemExit(3),
}


class Injector:
    """Calls a fault at one point of a call on this rank.

    Args:
        point: the number of the point; None: only count the points.
        fault: raises, kills or stops.
        kinds: what counts as a point.

    Attributes:
        reached: the kinds of the points so far.
        has_fired: whether the fault happened.
    """

    def __init__(
        self,
        point: int | None = None,
        fault: Callable[[], None] = lambda: None,
        kinds: tuple[str, ...] = (*STEPS, "before reduce", "after reduce"),
    ) -> None:
        self.point, self.fault, self.kinds = point, fault, kinds
        self.reached: list[str] = []
        self.has_fired = False

    def around(self, what: str, function: Callable) -> Callable:
        def watched(*arguments: Any) -> Any:
            self.reach(f"before {what}")
            result = function(*arguments)
            self.reach(f"after {what}")
            return result

        return watched

    def reach(self, kind: str) -> None:
        if kind in self.kinds:
            self.reached.append(kind)
            if self.point == len(self.reached) - 1:
                self.has_fired = True
                self.fault()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        run, local_step = Communicator.run, Communicator.local_step

        def watched_run(self_: Communicator, step: Callable, *facts_of: Any) -> Any:
            return run(self_, self.around("step", step), *facts_of)

        @contextlib.contextmanager
        def watched_step(self_: Communicator, *what: Any) -> Iterator[torch.Tensor]:
            with local_step(self_, *what) as shared:
                self.reach("before step")
                yield shared
                self.reach("after step")

        watched = {"run": watched_run, "local_step": watched_step}
        watched["_reduce"] = self.around("reduce", Communicator._reduce)
        with mock.patch.multiple(Communicator, **watched):
            yield


def raising(error: BaseException) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


class Setting:
    """A model that is pruned once, what a second pruning has to give, and how to ask for it."""

    def __init__(self, wrapping: str, method: str) -> None:
        data = "few" if method == "ties" else "normal"
        dense = fill(Net(), data, "float32")
        self.indices = wrappings.local_indices(dense, wrapping)
        self.model = wrappings.wrap(fill(Net(), data, "float32"), wrapping)
        self.targets = [target(wrappings.unwrapped(self.model), name) for name in NAMES]
        prune.global_unstructured(self.targets, prune.L1Unstructured, amount=0.3)
        scores = [dense.get_parameter(name).detach() for name in NAMES]
        first = reference.prune(scores, 0.3)
        self.keeps = dict(zip(NAMES, reference.prune(scores, 0.5, first), strict=True))
        self.method = method

    def prune(self, group: dist.ProcessGroup | None = None) -> None:
        cls, arguments = METHODS[self.method]
        prune.global_unstructured(self.targets, cls, group=group, **arguments)

    def wrong_masks(self) -> list[str]:
        if self.method in ("random", "bounded", "rows"):
            return []
        return wrong_masks(self.model, self.keeps, self.indices)


def outcome_of(
    setting: Setting, injector: Injector, group: dist.ProcessGroup | None = None
) -> tuple[str, str, list[str]]:
    """(type of the error, its text, what changed)."""
    before = snapshot(setting.model)
    try:
        with injector.active():
            setting.prune(group)
        error = ("nothing", "")
    except BaseException as raised:
        error = (type(raised).__name__, ascii(str(raised)))
    return *error, changes(before, snapshot(setting.model))


def wrong_after_raising(wrapping: str, method: str, error: str, odd_rank: int) -> list[str]:
    """A fault in each local step, one after the other; at last, on a new group, the call works."""
    wrong, setting = [], Setting(wrapping, method)
    is_odd, group = dist.get_rank() == odd_rank, dist.new_group()
    for point in range(200):
        injector = Injector(point if is_odd else None, raising(ERRORS[error]), STEPS)
        kind, text, changed = outcome_of(setting, injector, group if point > 10 else None)
        ends = torch.tensor([int(kind == "nothing"), -int(kind == "nothing")])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        if ends.tolist() != [-int(ends[1]), int(ends[1])]:
            return [*wrong, f"point {point}: only some ranks raised"]
        if kind == "nothing":  # there are fewer points than that
            wrong += [] if point > 10 else [f"only {point} points"]
            return wrong + setting.wrong_masks()
        wrong += [f"point {point}: changed {each}" for each in changed]
        if is_odd and not injector.has_fired:
            wrong.append(f"point {point}: the fault did not fire")
        expected = type(ERRORS[error]).__name__
        if not (kind == expected if is_odd and error in ("interrupt", "exit") else True):
            wrong.append(f"point {point}: {kind}, not {expected}")
        if f"on rank {odd_rank}" not in text and not is_odd:
            wrong.append(f"point {point}: {kind}: {text}")
    return [*wrong, "the call never works"]


@pytest.mark.parametrize(
    ("wrapping", "method", "error", "odd_rank"),
    [
        *(("plain-2", "l1", error, 1) for error in ERRORS),
        *(("fsdp2-3", "l1", error, 2) for error in ERRORS),
        *(
            (wrapping, method, "memory", 0)
            for turn, wrapping in enumerate(WRAPPINGS)
            for method in (METHODS if wrapping == "fsdp2-2" else every(len(METHODS), METHODS, turn))
        ),
    ],
)
def test_an_error_in_any_step(wrapping, method, error, odd_rank):
    assert_nothing_wrong_on(wrapping, wrong_after_raising, method, error, odd_rank)


# A rank is lost: each rank is a process of its own.


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stop this process until it receives SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS = {"fails": raising(ConnectionError("the network is gone")), "killed": kill, "stopped": stop}


def points_of(wrapping: str) -> list[str]:
    """The points of a call, as a rank comes by them."""
    setting, injector = Setting(wrapping, "l1"), Injector()
    with injector.active():
        setting.prune()
    return injector.reached


def wrong_on_this_rank(
    wrapping: str, fault: str, point: int, is_doomed: bool, is_last: bool, new_store: str
) -> list[str]:
    """What this rank sees when one is lost; survivors then prune in a group of their own."""
    setting = Setting(wrapping, "l1")
    injector = Injector(point if is_doomed else None, FAULTS[fault])
    kind, _, changed = outcome_of(setting, injector)
    if kind == "nothing":  # the last collective was over, so the pruning stands
        return setting.wrong_masks() + ["it did not raise"] * (not is_last)
    wrong = [f"changed {each}" for each in changed]
    wrong += ["the fault did not fire"] * (is_doomed and not injector.has_fired)
    if not is_doomed and wrapping.startswith("plain"):
        rank, size = dist.get_rank(), dist.get_world_size() - 1
        dist.destroy_process_group()
        store = dist.FileStore(new_store, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        setting.prune()
        wrong += setting.wrong_masks()
    return wrong


def be_a_rank(pipe: Connection, rank: int, size: int, folder: str, arguments: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=GROUP_TIMEOUT),
    )
    dist.barrier()
    pipe.send(wrong_on_this_rank(*arguments, f"{folder}/new"))
    os._exit(0)  # threads of a broken group may wait for ever


def answers_of(pipes: dict[Connection, int], stopped: int | None = None) -> dict[int, list[str]]:
    """Answers by rank, without ranks that died; sends SIGCONT to a stopped process."""
    answers, pending, deadline = {}, dict(pipes), time.monotonic() + DEADLINE
    while pending and time.monotonic() < deadline:
        if stopped is not None:  # again and again: it may not have come to its stop yet
            os.kill(stopped, signal.SIGCONT)
        for pipe in wait(list(pending), 0.2):
            rank = pending.pop(pipe)
            with contextlib.suppress(EOFError, OSError):  # it died
                answers[rank] = pipe.recv()
    return answers


def wrong_near(wrapping: str, fault: str, point: int, is_last: bool) -> list[str]:
    """What the ranks got wrong when the last one of them was lost at a point."""
    size = wrappings.world_size(wrapping)
    doomed, processes, pipes = size - 1, [], {}
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="doomed") as folder:
        for rank in range(size):
            pipe, far_end = context.Pipe()
            arguments = wrapping, fault, point, rank == doomed, is_last
            process = context.Process(
                target=be_a_rank, args=(far_end, rank, size, folder, arguments), daemon=True
            )
            process.start()
            far_end.close()
            processes.append(process)
            pipes[pipe] = rank
        try:
            answers = answers_of({p: rank for p, rank in pipes.items() if rank != doomed})
            stopped = processes[doomed].pid if fault == "stopped" else None
            answers |= answers_of({p: rank for p, rank in pipes.items() if rank == doomed}, stopped)
        finally:
            for process in processes:
                process.kill()
                process.join()
    at = f"{wrapping} {fault} at point {point}"
    silent, dead = {*range(size)} - {*answers}, {doomed} if fault == "killed" else set()
    wrong = [f"{at}: rank {rank}: {text}" for rank, texts in answers.items() for text in texts]
    wrong += [f"{at}: no answer of {silent}"] * (silent != dead)
    return wrong


@pytest.mark.slow
@pytest.mark.timeout(900)  # each lost rank is noticed after some seconds
@pytest.mark.parametrize("fault", ["killed", "stopped", "fails"])
@pytest.mark.parametrize("wrapping", ["plain-3", "fsdp1-2", "fsdp2-2", "tp-2"])
def test_a_rank_is_lost(wrapping, fault):
    """A rank is lost before or after a step or a collective."""
    points = run_ranks(points_of, wrappings.world_size(wrapping), wrapping)[0]
    assert points[-1] == "after reduce" and points.count("before reduce") > 6
    step = 1 if ALL_POINTS else 12 if fault != "killed" else 3 if THOROUGH else 12
    chosen = sorted({*range(len(points) - 1, -1, -step), len(points) - 2, 0})
    # The survivors of a stopped rank only wait for a timeout: all points can be tried at once.
    with ThreadPoolExecutor(5 if fault == "stopped" else 1) as pool:
        per_point = pool.map(
            lambda point: wrong_near(wrapping, fault, point, point == len(points) - 1), chosen
        )
        wrong = [text for texts in per_point for text in texts]
    assert not wrong, "\n".join(wrong)
