"""A pool of processes that starts once and is reused, each for one rank.

[Note: one group after another in one process] Three things make this safe:
  - a barrier right after init: a rank that failed while another was still inside
    init would leave their group counters apart, and the next call would hang;
  - DTensor's caches are cleared after destroy: they would return the mesh of the
    previous call, whose groups are destroyed, and keep the threads of those groups;
  - the groups are destroyed only when every rank has answered, so that no rank
    sees "connection closed by peer" because another one was quicker.

[Note: the last reference to a group] The destructor of a gloo group waits for its
threads, and a thread that frees the tensors of a collective needs the GIL. Python's own
reference to a group releases the GIL before it runs the destructor; other references, such
as that of DDP's reducer, do not, and the rank would hang (pytorch/pytorch#56297). So this
module keeps references of its own, and drops them last.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distprune.testing.calls import PackedCall, RankError, pack

if TYPE_CHECKING:
    RankConnection = Connection[Any, Any]


_GRACE = 3.0  # seconds that the other ranks get to answer once one has failed
# A worker with more threads is replaced: torch 2.11 never frees a mesh that FSDP2 or tensor
# parallelism has used, and each mesh keeps the threads of its group.
_MAX_THREADS = 64
_PRELOAD = [
    "numpy",
    "torch",
    "torch._dynamo",  # FSDP2 imports it at the first wrapping, for more than a second
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
]


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, **kwargs: Any
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every rank and return the results of rank 0, 1, ...

    The default process group (gloo) is initialised on all ranks and destroyed afterwards.
    Each rank has one torch thread; the random generators of the ranks start in different
    states. The processes keep the environment and the folder of the first call, and what
    ``fn`` leaves behind in modules; they share ``sys.path`` with the caller.

    Args:
        fn: a function at the top level of a module or test file; it, its arguments and
            its results travel by pickle.
        world_size: how many ranks, 1 to 8 or so.
        timeout: seconds until ranks that have not answered are killed. The first call also
            waits that long for the processes to start.

    Raises:
        RankError: with the traceback of each failing rank, and the place where
            each rank that did not answer was stuck. An AssertionError, so a failed test.
        TypeError: fn or an argument cannot travel: a lambda, a function inside a
            function, or one that is defined in ``__main__``.
        ValueError: ``world_size`` or ``timeout`` is not positive.

    Cost: some seconds for the first call of a process, then about 0.05 s for two ranks and
    0.1 s for four, plus what ``fn`` takes.
    """
    __tracebackhide__ = True  # pytest then shows the test's line, not this one
    if world_size < 1 or timeout <= 0:
        raise ValueError(f"{world_size=}, {timeout=}; expected positive numbers.")
    return _POOL.run(pack(fn, args, kwargs), world_size, timeout)


def preload(*modules: str) -> None:
    """Import further modules once, before the ranks' processes split off.

    This saves time for modules that most tests import and that load slowly, such as
    ``"transformers"``; modules that are not installed are ignored. Call it before the first
    :func:`run_ranks`, for instance in ``conftest.py``. Importing the modules must not start
    threads.

    Raises:
        RuntimeError: the processes have started.
    """
    if _POOL.has_started:
        raise RuntimeError(
            f"preload{modules} comes after the first run_ranks; expected it before, for instance "
            "at the top of conftest.py."
        )
    _PRELOAD.extend(name for name in modules if name not in _PRELOAD)


@dataclass(frozen=True)
class _Worker:
    process: Any
    pipe: RankConnection
    stack_file: Path

    def stack(self) -> str:
        return self.stack_file.read_text() if self.stack_file.exists() else ""

    def num_threads(self) -> int:
        """Threads of the process; 0 where /proc does not exist."""
        try:
            return len(os.listdir(f"/proc/{self.process.pid}/task"))
        except OSError:
            return 0


class _Pool:
    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._num_calls = 0
        self.has_started = False
        atexit.register(self.close)

    def run(self, call: PackedCall, world_size: int, timeout: float) -> list[Any]:
        __tracebackhide__ = True
        folder = self._start(world_size)
        self._num_calls += 1
        store = folder / f"store{self._num_calls}"
        try:
            for rank, worker in enumerate(self._workers[:world_size]):
                worker.pipe.send_bytes(pickle.dumps((rank, world_size, str(store), call)))
            answers = self._collect(world_size, timeout)
        except BaseException:  # a broken pipe or Ctrl-C: the state of the workers is unknown
            self.close()
            raise
        missing = [rank for rank in range(world_size) if rank not in answers]
        if missing:
            answers |= {rank: ("error", text) for rank, text in self._autopsy(missing).items()}
            self.close()
        else:
            for worker in self._workers[:world_size]:
                worker.pipe.send_bytes(b"")
            store.unlink(missing_ok=True)
        errors = {rank: text for rank, (kind, text) in answers.items() if kind == "error"}
        if errors:
            raise RankError(_report(errors, world_size))
        return [answers[rank][1] for rank in range(world_size)]

    def close(self) -> None:
        for worker in self._workers:
            worker.pipe.close()
            worker.process.kill()
            worker.process.join()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self, world_size: int) -> Path:
        """Start the workers that are missing; returns the folder for stores and stacks."""
        if any(not w.process.is_alive() or w.num_threads() > _MAX_THREADS for w in self._workers):
            self.close()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.has_started = True
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        folder = Path(self._folder.name)
        while len(self._workers) < world_size:
            stack_file = folder / f"stack{len(self._workers)}"
            pipe, far_end = context.Pipe()
            process = context.Process(target=work, args=(far_end, str(stack_file)), daemon=True)
            process.start()
            far_end.close()
            self._workers.append(_Worker(process, pipe, stack_file))
        return folder

    def _collect(self, world_size: int, timeout: float) -> dict[int, tuple[str, Any]]:
        """Answers by rank; a rank that died or ran out of time has none."""
        pending: dict[object, int] = {self._workers[rank].pipe: rank for rank in range(world_size)}
        deadline = time.monotonic() + timeout
        answers: dict[int, tuple[str, Any]] = {}
        while pending and (left := deadline - time.monotonic()) > 0:
            pipes = [self._workers[rank].pipe for rank in pending.values()]
            for pipe in wait(pipes, left):
                rank = pending.pop(pipe)
                with contextlib.suppress(EOFError, OSError):
                    answers[rank] = pickle.loads(self._workers[rank].pipe.recv_bytes())
                if answers.get(rank, ("error",))[0] == "error":
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return answers

    def _autopsy(self, ranks: list[int]) -> dict[int, str]:
        """How each rank died, or where it is stuck."""
        workers = {rank: self._workers[rank] for rank in ranks}
        stuck = []
        for rank, worker in workers.items():
            worker.process.join(0.1)
            # Without a stack file it is still starting, and the signal would end it.
            if worker.process.is_alive():
                stuck.append(rank)
                if worker.stack_file.exists():
                    os.kill(worker.process.pid, signal.SIGUSR1)
        patience = time.monotonic() + 2
        while time.monotonic() < patience and not all(workers[rank].stack() for rank in stuck):
            time.sleep(0.05)
        return {
            rank: f"no answer, killed\n{worker.stack()}"
            if rank in stuck
            else f"died (exit code {worker.process.exitcode})"
            for rank, worker in workers.items()
        }


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


# Private functions of torch, by module; a torch that lacks one has no such cache.
_DTENSOR_CACHES = {
    "torch.distributed.tensor.debug": ("_clear_sharding_prop_cache",),
    "torch.distributed.tensor._redistribute": (
        "clear_redistribute_planner_cache",
        "_gen_transform_infos.cache_clear",
    ),
    "torch.distributed.tensor._collective_utils": ("MeshTopoInfo.build_from_mesh.cache_clear",),
}


def work(pipe: RankConnection, stack_file: str) -> None:
    """Answer calls until the other end closes; SIGUSR1 writes the stack to a file."""
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # full collections then visit the tests' objects only, not the preloaded ones
    with open(stack_file, "w") as stacks, contextlib.suppress(EOFError, OSError):
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        while True:
            rank, world_size, store, call = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(_answer(rank, world_size, store, call))
            pipe.recv_bytes()  # every rank has answered
            _leave_group()


def clear_dtensor_caches() -> None:
    """Forget every mesh that DTensor has cached; see [Note: one group after another]."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    for module, functions in _DTENSOR_CACHES.items():
        for path in functions:
            function: Any = None
            with contextlib.suppress(ImportError):
                function = importlib.import_module(module)
            for attribute in path.split("."):
                function = getattr(function, attribute, None)
            if function is not None:
                function()


def _answer(rank: int, world_size: int, store: str, call: PackedCall) -> bytes:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore  # torch.distributed does not declare it

    try:
        dist.init_process_group(
            "gloo",
            store=FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=5),
        )
        dist.barrier()
        torch.manual_seed(1000 + rank)
        fn, args, kwargs = call.unpack()
        return pickle.dumps(("ok", fn(*args, **kwargs)))
    except BaseException:  # including SystemExit and pytest.fail
        return pickle.dumps(("error", traceback.format_exc()))


def _leave_group() -> None:
    import torch.distributed as dist

    groups: list[dist.ProcessGroup] = []
    if dist.is_initialized():
        groups += dist.distributed_c10d._world.pg_map
        dist.destroy_process_group()
    clear_dtensor_caches()
    gc.collect()  # wrapped models are reference cycles that keep the group and its threads
    groups.clear()  # the last references; see [Note: the last reference to a group]
