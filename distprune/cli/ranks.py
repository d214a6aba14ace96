"""The ranks of a command: their process group, and ``--nproc``, which starts them.

The processes of ``--nproc`` meet at a file, so no port is needed. torch's launcher does not serve
here: it ends all ranks as soon as one fails, so that the message of the first rank can be lost; it
ends with 1 whatever the ranks end with; and after a second signal it leaves ranks behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType

import typer

import distprune
from distprune.cli import process
from distprune.files.errors import RanksError


@contextlib.contextmanager
def process_group(timeout: float, backend: str = "gloo") -> Iterator[None]:
    """Join the other ranks, if there are any, in a process group."""
    if not process.is_rank():
        yield
        return
    import torch.distributed as dist

    store = os.environ.get(process.STORE)
    try:
        dist.init_process_group(
            backend,
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


GRACE_SECONDS = 30.0  # for the other ranks, after a failure of one or a signal
KILL_SECONDS = 5.0  # between SIGTERM and SIGKILL
_POLL_SECONDS = 0.05


def run_on_ranks(
    context: typer.Context, num_ranks: int | None, check: Callable[[], object] | None = None
) -> None:
    """Run the command on ``num_ranks`` processes and exit with its code; None: return."""
    if num_ranks is None:
        return
    if process.is_rank():
        raise typer.BadParameter("torchrun has started the processes already; leave it out.")
    if check is not None:
        check()
    raise typer.Exit(start_ranks(without_option(context.obj, "--nproc"), num_ranks))


def start_ranks(arguments: Sequence[str], num_ranks: int) -> int:
    """Run a command of distprune in several processes on this machine, and wait for all.

    The processes run this package with this Python, and never a module of the current folder.
    With ``--json``, exactly one document is written to stdout, even if rank 0 is killed.
    """
    as_json = process.wants_json(arguments)
    with tempfile.TemporaryDirectory(prefix="distprune") as folder:
        own = {
            "WORLD_SIZE": str(num_ranks), process.STORE: str(Path(folder, "store")),
            process.PARENT: str(os.getpid()), "PYTHONSAFEPATH": "1",
        }  # fmt: skip
        # Ranks that all use every core slow one another down.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **own}
        document = Path(folder, "document.json")
        messages: list[str] = []

        def say(text: str) -> None:
            messages.append(text)
            with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed
                print(f"distprune: {text}", file=sys.stderr, flush=True)

        def start(rank: int) -> subprocess.Popen[bytes]:
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

        code = Watch(say).run(start, num_ranks)
        if as_json:
            _pass_on(document, code, " ".join(messages))
        return code


class Watch:
    """Starts processes, one for each rank, and waits for all of them.

    A signal is passed on to all of them. After a failure of one, or a signal, the others have
    ``GRACE_SECONDS`` to end; then they get SIGTERM, and ``KILL_SECONDS`` later SIGKILL. A second
    signal kills them at once.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._processes: list[subprocess.Popen[bytes]] = []
        self._signals: list[int] = []  # received so far
        self._is_signalled = False
        self._is_terminating = False
        self._deadline: float | None = None
        self._failed: set[int] = set()  # ranks that ended with a failure
        self._killed: set[int] = set()  # ranks that got SIGKILL from this process
        self._causes: list[int] = []  # exit codes of failures that this process did not cause

    def run(self, start: Callable[[int], subprocess.Popen[bytes]], num_ranks: int) -> int:
        """Start all ranks and wait for them."""
        previous = {n: signal.signal(n, self._on_signal) for n in process.SIGNALS}
        try:
            for rank in range(num_ranks):
                # Blocked signals are inherited; the rank unblocks them when it is ready.
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, process.SIGNALS)
                try:
                    self._processes.append(start(rank))
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            while any(child.poll() is None for child in self._processes):
                self._poll()
                time.sleep(_POLL_SECONDS)
            self._note_failures()
        finally:
            for child in self._processes:
                child.kill()
            for child in self._processes:
                child.wait()
            for number, handler in previous.items():
                signal.signal(number, handler)
        return self._code()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _poll(self) -> None:
        """Pass on signals, and end processes that have not ended by their deadline."""
        self._note_failures()
        if self._signals and not self._is_signalled:
            self._is_signalled = True
            self._send(self._signals[0])
            self._begin_grace()
        elif len(self._signals) > 1:
            self._kill("a second signal came")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            if self._is_terminating:
                self._kill(f"SIGTERM did not end it in {KILL_SECONDS:.0f} s")
            else:
                self._is_terminating = True
                self._deadline = time.monotonic() + KILL_SECONDS
                self._send(signal.SIGTERM)

    def _note_failures(self) -> None:
        for rank, child in enumerate(self._processes):
            code = child.poll()
            if not code or rank in self._failed:
                continue
            self._failed.add(rank)
            self._begin_grace()
            if self._is_signalled or self._is_terminating or rank in self._killed:
                continue  # this process caused it
            self._causes.append(code)
            if code < 0:
                self._say(
                    f"the process of rank {rank} was ended by {_name(-code)}; if that was SIGKILL, "
                    "the machine may have run out of memory. Run the same command again: it "
                    "continues where this one stopped."
                )

    def _begin_grace(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + GRACE_SECONDS

    def _send(self, number: int) -> None:
        for child in self._processes:
            child.send_signal(number)  # does nothing if it has ended

    def _kill(self, why: str) -> None:
        alive = [rank for rank, child in enumerate(self._processes) if child.poll() is None]
        if not set(alive) <= self._killed:
            self._say(f"killing the process of rank {', '.join(map(str, alive))}: {why}.")
        self._killed |= set(alive)
        for rank in alive:
            self._processes[rank].kill()

    def _code(self) -> int:
        if not any(child.returncode for child in self._processes):
            return process.OK
        if self._causes:
            # Ranks that fail because another one has ended return 5.
            codes = [code for code in self._causes if code != process.DISTRIBUTED]
            return codes[0] if codes and min(codes) > 0 else process.DISTRIBUTED
        is_interrupt = self._signals[:1] == [signal.SIGINT]
        return process.INTERRUPTED if is_interrupt else process.TERMINATED


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _pass_on(document: Path, code: int, text: str) -> None:
    """Write the JSON document of rank 0; if it wrote none, one with the exit code and a reason."""
    try:
        written = document.read_text(encoding="utf-8")
        json.loads(written)
    except (OSError, ValueError):
        written = json.dumps({"exit_code": code, "error": text or "stopped before the end."}) + "\n"
    process.write_document(written)


def _python() -> list[str]:
    """This Python, as strict as it was started, and without the current folder on its path."""
    flags = sys.flags
    options = [("-I", flags.isolated), ("-E", flags.ignore_environment), ("-s", flags.no_user_site)]
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    return [sys.executable, *safe, *(name for name, is_set in options if is_set)]


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
