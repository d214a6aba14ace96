"""One process or many: those of torchrun, or those that ``--nproc`` starts here.

``--nproc`` starts the same command as processes of its own, which meet at a file: no port, and
their exit codes come through, which torchrun's do not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType

from distprune.cli import exits
from distprune.files.errors import RanksError

_STORE = "DISTPRUNE_STORE"
_PARENT = "DISTPRUNE_PARENT"


def is_leader() -> bool:
    """Whether this process speaks for all: rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def is_rank() -> bool:
    """Whether somebody has started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextlib.contextmanager
def process_group(timeout: float) -> Iterator[None]:
    """Join the other ranks, if there are any, over gloo.

    Args:
        timeout: seconds after which a rank that does not answer counts as lost.

    Raises:
        RanksError: the ranks do not find each other.
    """
    if not is_rank():
        yield
        return
    import torch.distributed as dist

    store = os.environ.get(_STORE)
    try:
        dist.init_process_group(
            "gloo",
            init_method="env://" if store is None else f"file://{store}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=timeout),
        )
    except (ValueError, RuntimeError) as error:
        raise RanksError(f"the ranks did not meet: {error}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


class Stop:
    """SIGINT and SIGTERM as a question that long work asks: see ``prune(stop=...)``.

    A second signal ends the process at once. A rank that ``--nproc`` started also stops when
    the process that started it is gone.

    Attributes:
        code: the exit code of the signal that came; None before.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        parent = os.environ.get(_PARENT)
        self._parent = None if parent is None else int(parent)

    def __call__(self) -> bool:
        return self.code is not None or (self._parent is not None and os.getppid() != self._parent)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals while in the context."""
        before = {each: signal.signal(each, self._heard) for each in _SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        is_second = self.code is not None
        self.code = exits.INTERRUPTED if number == signal.SIGINT else exits.TERMINATED
        if is_second:
            os._exit(self.code)


def start_ranks(arguments: Sequence[str], num_ranks: int) -> int:
    """Run a command of distprune on several processes of this machine, and wait for all.

    Args:
        arguments: of the command, without ``--nproc``.
        num_ranks: how many processes.

    Returns:
        The exit code: of the first rank, in order, that failed by itself; 5 if one was killed.
    """
    with tempfile.TemporaryDirectory(prefix="distprune") as folder:
        own = {
            "WORLD_SIZE": str(num_ranks), _STORE: str(Path(folder, "store")),
            _PARENT: str(os.getpid()),
        }  # fmt: skip
        # Ranks that each take all cores for themselves wait for one another.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **own}
        command = [sys.executable, "-m", "distprune", *arguments]
        processes: list[subprocess.Popen] = []

        def forward(number: int, frame: FrameType | None) -> None:
            for process in processes:
                process.send_signal(number)

        before = {each: signal.signal(each, forward) for each in _SIGNALS}
        try:
            for rank in range(num_ranks):
                # In a session of its own: Ctrl-C comes through here, once.
                process = subprocess.Popen(
                    command, env={**environment, "RANK": str(rank)}, start_new_session=True
                )
                processes.append(process)
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
            for each, handler in before.items():
                signal.signal(each, handler)
    if any(code < 0 for code in codes):
        return exits.DISTRIBUTED
    return next((code for code in codes if code), exits.OK)


def without_option(arguments: Sequence[str], name: str) -> list[str]:
    """A command line without an option that takes a value."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and not argument.startswith(name + "=") and argument != name:
            kept.append(argument)
        skip = argument == name and not skip
    return kept


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
