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

Calls travel by pickle, with the files that their functions are in.

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
import importlib.util
import io
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
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

__all__ = ["RankError", "preload", "run_ranks"]


class RankError(AssertionError):
    """A rank raised, died or did not answer; the text holds its traceback."""


@dataclass(frozen=True)
class ModuleFile:
    """The file of a module; pytest loads test files by path, under names that it chooses."""

    name: str
    file: str | None
    folders: list[str] | None  # of a package


@dataclass(frozen=True)
class PackedCall:
    """A function and its arguments for another process.

    Attributes:
        call: pickled (fn, args, kwargs).
        modules: the modules of every function and class in it, parents first.
        paths: the caller's ``sys.path``.
    """

    call: bytes
    modules: list[ModuleFile]
    paths: list[str]

    def unpack(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """In the other process: import the modules and return (fn, args, kwargs)."""
        sys.path[:] = self.paths
        importlib.invalidate_caches()  # files may be younger than this process
        for module in self.modules:
            _make_importable(module)
        fn, args, kwargs = pickle.loads(self.call)
        return fn, args, kwargs


def pack(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedCall:
    """Pickle a call.

    Raises:
        TypeError: fn or an argument cannot be found by name in another process: it is a lambda,
            is defined inside a function or in ``__main__``, or is no picklable value.
    """
    if not callable(fn):
        raise TypeError(f"fn={fn!r} is not callable; expected a function of a module.")
    buffer = io.BytesIO()
    pickler = _ModuleRecorder(buffer)
    try:
        pickler.dump((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{_name(fn)} and its arguments must travel to the ranks by pickle: {error}. Expected "
            "a function at the top level of a module or test file (no lambda, no function inside "
            "a function), and arguments that can be pickled."
        ) from error
    if "__main__" in pickler.modules:
        raise TypeError(
            f"{_name(fn)} or one of its arguments is defined in __main__, which other processes "
            "cannot import; expected a function of a module. Move it to a file that pytest "
            "collects, or to one that the script imports."
        )
    return PackedCall(buffer.getvalue(), _with_parents(pickler.modules), list(sys.path))


class _ModuleRecorder(pickle.Pickler):
    """Records the module of every function and class that it pickles by name."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.modules: dict[str, None] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (types.FunctionType, type)):
            self.modules[obj.__module__] = None
        return NotImplemented


def _with_parents(names: dict[str, None]) -> list[ModuleFile]:
    """The modules and their parent packages, outermost first, as loaded in this process."""
    files: dict[str, ModuleFile] = {}
    for name in names:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            part = ".".join(parts[:length])
            module = sys.modules.get(part)
            folders = getattr(module, "__path__", None)
            file = getattr(module, "__file__", None)
            folders = None if folders is None else [str(folder) for folder in folders]
            if file or folders:  # not built in
                files.setdefault(part, ModuleFile(part, file, folders))
    return list(files.values())


def _make_importable(module_file: ModuleFile) -> None:
    """Make the module's name stand for the same file as in the calling process."""
    name, file = module_file.name, module_file.file
    if _is_from(sys.modules.get(name), module_file):
        return
    sys.modules.pop(name, None)  # of an earlier call, from another file
    if _would_find(module_file):
        importlib.import_module(name)
    elif file is None:  # a folder without __init__.py
        module = types.ModuleType(name)
        module.__path__ = module_file.folders or []
        sys.modules[name] = module
    else:
        spec = importlib.util.spec_from_file_location(
            name, file, submodule_search_locations=module_file.folders
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"module {name}: Python has no loader for {file}.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise


def _is_from(module: types.ModuleType | None, module_file: ModuleFile) -> bool:
    return module is not None and getattr(module, "__file__", None) == module_file.file


def _would_find(module_file: ModuleFile) -> bool:
    """Whether an ordinary import finds exactly that file."""
    try:
        spec = importlib.util.find_spec(module_file.name)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.has_location and spec.origin == module_file.file


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


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
