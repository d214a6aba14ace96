"""Test distributed code in a fraction of a second: run a function on 1 to 8 gloo ranks.

The ranks are real processes that talk over gloo. They start once per pytest process (some
seconds) and are reused; each further call only makes a new process group (some 50 ms for two
ranks)::

    import torch
    import torch.distributed as dist

    from distprune.testing import run_ranks


    def sum_of_ranks():  # a function of the test's file, not a lambda
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total)
        return int(total)


    def test_all_reduce():
        assert run_ranks(sum_of_ranks, 4) == [6, 6, 6, 6]

A failing rank's traceback becomes the text of a :class:`RankError`; a rank that hangs is killed
at the deadline, and its stack is shown. No network port is needed, so any number of
pytest processes (``pytest -n 4`` of pytest-xdist) can run side by side. The machine needs no
accelerator and no more cores than one. Linux and macOS; nothing here imports pytest.

The library itself does not need this module, and ``import distprune`` does not load it.

Calls travel by pickle, with the file that their function is in.

[Note: one group after another in one process] A barrier right after init, because a rank that
failed while another was still inside init would leave their group counters apart, and the next call
would hang; and the groups are destroyed only when every rank has answered, so that no rank sees
"connection closed by peer" because another one was quicker. See also collectives.[Note: the last
reference to a group].
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

__all__ = ["RankError", "preload", "run_ranks"]


class RankError(AssertionError):
    """A rank raised, died or did not answer; the text holds its traceback."""


def _packed(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """A call for another process, with the file of its module, which pytest loads by path.

    Raises:
        TypeError: fn or an argument cannot be found by name in another process: it is a lambda,
            is defined inside a function or in ``__main__``, or is no picklable value.
    """
    name = getattr(fn, "__module__", None) or ""
    try:
        data = pickle.dumps((fn, args, kwargs))
        if name == "__main__":
            raise TypeError("the function is defined in __main__")
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{fn!r} and its arguments must travel to the ranks by pickle: {error}. Expected a "
            "function at the top level of a module or test file (no lambda, no function inside a "
            "function, none of __main__), and arguments that can be pickled."
        ) from error
    files = {}  # of the module, after its parents
    for part in accumulate(name.split("."), "{}.{}".format):
        module = sys.modules.get(part)
        folders = getattr(module, "__path__", None)
        files[part] = getattr(module, "__file__", None), folders and list(folders)
    return pickle.dumps((sys.path, files, data))


def _unpacked(call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """In the other process: import the modules and return (fn, args, kwargs)."""
    sys.path[:], files, data = pickle.loads(call)
    importlib.invalidate_caches()  # files may be younger than this process
    for name, (file, folders) in files.items():
        if file or folders:  # not built in
            _make_importable(name, file, folders)
    fn, args, kwargs = pickle.loads(data)
    return fn, args, kwargs


def _make_importable(name: str, file: str | None, folders: list[str] | None) -> None:
    """Make the module's name stand for the same file as in the calling process."""

    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == file:
        return
    sys.modules.pop(name, None)  # of an earlier call, from another file
    with contextlib.suppress(ImportError):
        if getattr(importlib.import_module(name), "__file__", None) == file:
            return
    if file is None:  # a folder without __init__.py
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = folders or []
        return
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None, f"Python has no loader for {file}."
    sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules[name])
    except BaseException:
        del sys.modules[name]
        raise


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
    return _POOL.run(_packed(fn, args, kwargs), world_size, timeout)


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


_Worker = tuple[Any, Any, Path]  # the process, our end of its pipe, and the file for its stack


class _Pool:
    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._num_calls = 0
        self.has_started = False
        atexit.register(self.close)

    def run(self, call: bytes, world_size: int, timeout: float) -> list[Any]:
        __tracebackhide__ = True
        store = self._start(world_size)
        workers = self._workers[:world_size]
        try:
            for rank, (_, pipe, _) in enumerate(workers):
                pipe.send((rank, world_size, store, call))
            answers = _collect(workers, timeout)
        except BaseException:  # a broken pipe or Ctrl-C: the state of the workers is unknown
            self.close()
            raise
        errors = {rank: text for rank, (kind, text) in answers.items() if kind == "error"}
        if len(answers) < world_size:
            errors |= _autopsy({r: w for r, w in enumerate(workers) if r not in answers})
            self.close()
        else:
            for _, pipe, _ in workers:
                pipe.send(None)
            Path(store).unlink(missing_ok=True)
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

    def _start(self, world_size: int) -> str:
        """Start the workers that are missing; returns a name for the store of the next call."""
        for process, _, _ in self._workers:
            threads = Path(f"/proc/{process.pid}/task").glob("*")  # none on macOS
            if not process.is_alive() or sum(1 for _ in threads) > _MAX_THREADS:
                self.close()
                break
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.has_started = True
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        while len(self._workers) < world_size:
            stack_file = Path(self._folder.name, f"stack{len(self._workers)}")
            pipe, far_end = context.Pipe()
            process = context.Process(target=_work, args=(far_end, stack_file), daemon=True)
            process.start()
            far_end.close()
            self._workers.append((process, pipe, stack_file))
        self._num_calls += 1
        return f"{self._folder.name}/store{self._num_calls}"


def _collect(workers: list[_Worker], timeout: float) -> dict[int, tuple[str, Any]]:
    """Answers by rank; a rank that died or ran out of time has none."""
    pending: dict[object, int] = {pipe: rank for rank, (_, pipe, _) in enumerate(workers)}
    deadline = time.monotonic() + timeout
    answers: dict[int, tuple[str, Any]] = {}
    while pending and (left := deadline - time.monotonic()) > 0:
        for pipe in wait([workers[rank][1] for rank in pending.values()], left):
            rank = pending.pop(pipe)
            with contextlib.suppress(EOFError, OSError):
                answers[rank] = pickle.loads(workers[rank][1].recv_bytes())
            if answers.get(rank, ("error",))[0] == "error":
                deadline = min(deadline, time.monotonic() + _GRACE)
    return answers


def _autopsy(workers: dict[int, _Worker]) -> dict[int, str]:
    """How each rank died, or where it is stuck."""
    for process, _, _ in workers.values():
        process.join(0.1)
    stuck = [(r, process, file) for r, (process, _, file) in workers.items() if process.is_alive()]
    for _, process, file in stuck:
        if file.exists():  # else it is still starting
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5 if stuck else 0)  # while they write
    texts = {r: f"died (exit code {process.exitcode})" for r, (process, _, _) in workers.items()}
    for rank, _, file in stuck:
        texts[rank] = f"no answer, killed\n{file.read_text() if file.exists() else ''}"
    return texts


def _report(errors: dict[int, str], world_size: int) -> str:
    """Ranks that failed in the same way are reported together, raised errors first."""
    ranks_by_text: dict[str, list[str]] = {}
    for rank, text in sorted(errors.items()):
        ranks_by_text.setdefault(text.rstrip(), []).append(str(rank))
    ordered = sorted(ranks_by_text.items(), key=lambda item: item[0].startswith("no answer"))
    return "\n".join(f"rank {', '.join(ranks)} of {world_size}: {text}" for text, ranks in ordered)


_POOL = _Pool()


def _work(pipe: Any, stack_file: Path) -> None:
    """Answer calls until the other end closes; SIGUSR1 writes the stack to a file."""
    import torch

    from distprune.ranks.collectives import end_groups

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # full collections then visit the tests' objects only, not the preloaded ones
    with open(stack_file, "w") as stacks, contextlib.suppress(EOFError, OSError):
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        while True:
            pipe.send_bytes(_answer(*pipe.recv()))
            pipe.recv()  # every rank has answered
            end_groups()


def _answer(rank: int, world_size: int, store: str, call: bytes) -> bytes:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore  # torch.distributed does not declare it

    patience = timedelta(minutes=5)
    try:
        meeting = FileStore(store, world_size)
        dist.init_process_group("gloo", None, patience, world_size, rank, meeting)
        dist.barrier()
        torch.manual_seed(1000 + rank)
        fn, args, kwargs = _unpacked(call)
        return pickle.dumps(("ok", fn(*args, **kwargs)))
    except BaseException:  # including SystemExit and pytest.fail
        return pickle.dumps(("error", traceback.format_exc()))
