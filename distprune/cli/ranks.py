"""One process or many: those of torchrun, or those that ``--nproc`` starts here.

``--nproc`` starts the same command as processes of its own, which meet at a file: no port, and
their exit codes come through, which torchrun's do not.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import distprune
from distprune.cli import exits, streams, watching
from distprune.files.errors import RanksError

_STORE = "DISTPRUNE_STORE"
_PARENT = "DISTPRUNE_PARENT"


def is_leader() -> bool:
    """Whether this process speaks for all: rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def is_rank() -> bool:
    """Whether somebody has started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_child() -> bool:
    """Whether ``--nproc`` of another process has started this one."""
    return _PARENT in os.environ


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
        self._before: dict[int, Any] = {}
        parent = os.environ.get(_PARENT)
        self._parent = None if parent is None else int(parent)

    def __call__(self) -> bool:
        return self.code is not None or (self._parent is not None and os.getppid() != self._parent)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals while in the context."""
        self._before = {each: signal.signal(each, self._heard) for each in watching.SIGNALS}
        try:
            yield
        finally:
            for each, handler in self._before.items():
                signal.signal(each, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        is_second = self.code is not None
        self.code = exits.INTERRUPTED if number == signal.SIGINT else exits.TERMINATED
        if is_second:
            before = self._before[number]
            if getattr(before, "ends_the_process", False):
                before(number, frame)  # says so
            os._exit(self.code)


def start_ranks(arguments: Sequence[str], num_ranks: int) -> int:
    """Run a command of distprune on several processes of this machine, and wait for all.

    The processes run this package with this Python, and never a module of the current folder.
    With ``--json``, exactly one document is written to stdout, even if rank 0 was killed.

    Args:
        arguments: of the command, without ``--nproc``.
        num_ranks: how many processes.

    Returns:
        The exit code; see :meth:`distprune.cli.watching.Watch.run`.
    """
    as_json = streams.wants_json(arguments)
    with tempfile.TemporaryDirectory(prefix="distprune") as folder:
        own = {
            "WORLD_SIZE": str(num_ranks), _STORE: str(Path(folder, "store")),
            _PARENT: str(os.getpid()), "PYTHONSAFEPATH": "1",
        }  # fmt: skip
        # Ranks that each take all cores for themselves wait for one another.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **own}
        document = Path(folder, "document.json")
        told: list[str] = []

        def say(text: str) -> None:
            told.append(text)
            watching.say(text)

        def start(rank: int) -> subprocess.Popen:
            output = document.open("wb") if as_json and rank == 0 else None
            try:
                # In a session of its own: Ctrl-C comes through here, once.
                return subprocess.Popen(
                    [*_python(), "-c", _BOOTSTRAP, distprune.__file__, *arguments],
                    env={**environment, "RANK": str(rank)},
                    start_new_session=True,
                    stdout=output,
                )
            finally:
                if output is not None:
                    output.close()

        code = watching.Watch(say).run(start, num_ranks)
        if as_json:
            _pass_on(document, code, " ".join(told))
        return code


def _pass_on(document: Path, code: int, text: str) -> None:
    """Write the JSON document of rank 0, or one that says how it ended without any."""
    try:
        written = document.read_text(encoding="utf-8")
        json.loads(written)
    except (OSError, ValueError):
        written = json.dumps({"exit_code": code, "error": text or "stopped before the end."}) + "\n"
    streams.write_document(written)


def _python() -> list[str]:
    """This Python, as strict as it was started, and without the current folder on its path."""
    flags = sys.flags
    given = [("-I", flags.isolated), ("-E", flags.ignore_environment), ("-s", flags.no_user_site)]
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    return [sys.executable, *safe, *(name for name, is_set in given if is_set)]


# Runs this very package, wherever it was found. Python 3.10 has no -P: '' is the current folder.
_BOOTSTRAP = """
import sys
sys.path[:] = [folder for folder in sys.path if folder]
import importlib.util, os
path = sys.argv.pop(1)
spec = importlib.util.spec_from_file_location(
    "distprune", path, submodule_search_locations=[os.path.dirname(path)]
)
package = sys.modules["distprune"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from distprune.cli.main import main
main()
"""


def without_option(arguments: Sequence[str], name: str) -> list[str]:
    """A command line without an option that takes a value."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and not argument.startswith(name + "=") and argument != name:
            kept.append(argument)
        skip = argument == name and not skip
    return kept
