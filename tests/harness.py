"""Run a function on several ranks: ``run_ranks(fn, world_size, *args)``.

The ranks are real processes that talk over gloo. They start once per pytest
process (some seconds) and are reused; each call only makes a new process group
(some 50 ms). No port is chosen here, so several pytest processes do not meet.

[Note: one group after another in one process] Three things make that safe:
  - a barrier right after init: a rank that failed while another was still inside
    init would leave their group counters apart, and the next call would hang;
  - DTensor's caches are cleared after destroy: they hand out the mesh of the
    previous call, whose groups are dead, and keep the threads of those groups;
  - the groups are destroyed only when every rank has answered, so that no rank
    sees "connection closed by peer" because another one was quicker.
"""

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

GRACE = 3.0  # seconds that the other ranks get to answer once one has failed
PRELOAD = [
    "numpy",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "torch.nn.utils.prune",
]


class RankError(AssertionError):
    """A rank raised, died or did not answer; the text holds its traceback."""


def run_ranks(
    fn: Callable, world_size: int, *args: Any, timeout: float = 120.0, **kwargs: Any
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every rank and return the results of rank 0, 1, ...

    The default process group is initialised on all ranks, each has one torch
    thread, and the random generators of the ranks start in different states.

    Args:
        fn: a module-level function; it, its arguments and its results travel by pickle.
        timeout: seconds until ranks that have not answered are killed.

    Raises:
        RankError: with the traceback of each failing rank, and the place where
            each rank that did not answer was stuck.
    """
    __tracebackhide__ = True
    return _POOL.run(fn, world_size, args, kwargs, timeout)


def run_fake_ranks(
    fn: Callable, world_size: int, *args: Any, ranks: Iterable[int] | None = None, **kwargs: Any
) -> list[Any]:
    """Call fn as each of ``ranks`` in turn, in this process: for geometry at any world size.

    Collectives do nothing there; pass ``src_data_rank=None`` to distribute_tensor.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    results = []
    for rank in range(world_size) if ranks is None else ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            results.append(fn(*args, **kwargs))
        finally:
            dist.destroy_process_group()
            _clear_dtensor_caches()
    return results


def _clear_dtensor_caches() -> None:
    from torch.distributed.tensor import _collective_utils, _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


# --- in the worker -------------------------------------------------------------------


def _work(pipe: multiprocessing.connection.Connection, stack_file: str, paths: list[str]) -> None:
    sys.path[:] = paths
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is preloaded stays: full collections then look at the tests' objects only
    with open(stack_file, "w") as stacks, contextlib.suppress(EOFError, OSError):
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        while True:
            rank, world_size, store, call = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(_answer(rank, world_size, store, call))
            pipe.recv_bytes()  # every rank has answered
            _leave_group()


def _answer(rank: int, world_size: int, store: str, call: bytes) -> bytes:
    import torch
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=5),
        )
        dist.barrier()
        torch.manual_seed(1000 + rank)
        fn, args, kwargs = pickle.loads(call)
        return pickle.dumps(("ok", fn(*args, **kwargs)))
    except BaseException:  # SystemExit and pytest.fail must reach the parent too
        return pickle.dumps(("error", traceback.format_exc()))


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_dtensor_caches()
    gc.collect()  # wrapped models are reference cycles that hold the dead group and its threads


# --- in the parent -------------------------------------------------------------------


class _Pool:
    def __init__(self) -> None:
        self._workers: list[tuple[Any, Any, Path]] = []  # process, pipe, file for its stack
        self._folder: tempfile.TemporaryDirectory | None = None
        self._num_calls = 0
        atexit.register(self.close)

    def run(
        self, fn: Callable, world_size: int, args: tuple, kwargs: dict, timeout: float
    ) -> list[Any]:
        __tracebackhide__ = True
        call = pickle.dumps((fn, args, kwargs))
        self._start(world_size)
        self._num_calls += 1
        store = Path(self._folder.name, f"store{self._num_calls}")
        try:
            for rank, (_, pipe, _) in enumerate(self._workers[:world_size]):
                pipe.send_bytes(pickle.dumps((rank, world_size, str(store), call)))
            answers = self._collect(world_size, timeout)
        except BaseException:  # a broken pipe or Ctrl-C: the state of the workers is unknown
            self.close()
            raise
        missing = [rank for rank in range(world_size) if rank not in answers]
        if missing:
            answers |= {rank: ("error", text) for rank, text in self._autopsy(missing).items()}
            self.close()
        else:
            for _, pipe, _ in self._workers[:world_size]:
                pipe.send_bytes(b"")
            store.unlink(missing_ok=True)
        errors = {rank: text for rank, (kind, text) in answers.items() if kind == "error"}
        if errors:
            raise RankError(_report(errors, world_size))
        return [answers[rank][1] for rank in range(world_size)]

    def close(self) -> None:
        for process, pipe, _ in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self, world_size: int) -> None:
        if any(not process.is_alive() for process, _, _ in self._workers):
            self.close()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        while len(self._workers) < world_size:
            stack_file = Path(self._folder.name, f"stack{len(self._workers)}")
            pipe, far_end = context.Pipe()
            process = context.Process(
                target=_work, args=(far_end, str(stack_file), list(sys.path)), daemon=True
            )
            process.start()
            far_end.close()
            self._workers.append((process, pipe, stack_file))

    def _collect(self, world_size: int, timeout: float) -> dict[int, tuple[str, Any]]:
        """Answers by rank; a rank that died or ran out of time has none."""
        pending = {self._workers[rank][1]: rank for rank in range(world_size)}
        deadline = time.monotonic() + timeout
        answers = {}
        while pending and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pending), left):
                rank = pending.pop(pipe)
                with contextlib.suppress(EOFError, OSError):
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                if answers.get(rank, ("error",))[0] == "error":
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _autopsy(self, ranks: list[int]) -> dict[int, str]:
        """How each rank died, or where it is stuck."""
        workers = {rank: self._workers[rank] for rank in ranks}
        stuck = []
        for rank, (process, _, _) in workers.items():
            process.join(0.1)
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
                stuck.append(rank)
        patience = time.monotonic() + 2
        while time.monotonic() < patience and not all(_stack(workers[rank]) for rank in stuck):
            time.sleep(0.05)
        return {
            rank: f"no answer, killed\n{_stack(worker)}"
            if rank in stuck
            else f"died (exit code {worker[0].exitcode})"
            for rank, worker in workers.items()
        }


def _stack(worker: tuple[Any, Any, Path]) -> str:
    return worker[2].read_text()


def _report(errors: dict[int, str], world_size: int) -> str:
    """Ranks that failed in the same way are reported together, raised errors first."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in sorted(errors.items()):
        ranks_by_text.setdefault(text, []).append(rank)
    ordered = sorted(ranks_by_text.items(), key=lambda item: item[0].startswith("no answer"))
    return "\n".join(
        f"rank {', '.join(map(str, ranks))} of {world_size}: {text.rstrip()}"
        for text, ranks in ordered
    )


_POOL = _Pool()
