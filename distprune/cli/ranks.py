"""The ranks of a command: their process group, and ``--nproc``, which starts them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

import distprune
from distprune.cli import process
from distprune.cli.options import RankOptions
from distprune.files.errors import RanksError

if TYPE_CHECKING:  # torch comes with it
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

T = TypeVar("T")


@contextlib.contextmanager
def process_group(timeout: float, backend: str = "gloo") -> Iterator[None]:
    """Join the other ranks, if there are any, in a process group."""
    if not process.is_rank():
        yield
        return
    import torch.distributed as dist

    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (ValueError, RuntimeError) as error:
        raise RanksError(f"the ranks did not meet: {error}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def on_ranks(
    context: typer.Context, given: RankOptions, find: Callable[[], T]
) -> Iterator[tuple[T, process.Stop]]:
    """Do the rest on the ranks of a command, with what all of them find, and whether to stop."""
    run_on_ranks(context, given.nproc, find)
    from distprune._common.process_groups import world
    from distprune.files.team import Team

    # Listen before the ranks meet: a signal to all of them must not end some of them at once.
    with process.Stop() as stop, process_group(given.timeout):
        yield Team(world()).attempt(find), stop


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


_KILLED_AFTER = 30.0  # seconds, of the launcher

# Runs this very package, and never a module of the current folder ('').
_START = """
import sys
sys.path[:] = filter(None, sys.path)
import importlib.util
path = sys.argv.pop(1)
spec = importlib.util.spec_from_file_location(
    "distprune", path, submodule_search_locations=[path.rpartition("/")[0]]
)
package = sys.modules["distprune"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from distprune.cli.main import main
main()
"""


def start_ranks(arguments: Sequence[str], num_ranks: int) -> int:
    """Run a command of distprune under torch's launcher, and return the exit code of the failure.

    With ``--json``, exactly one document is written to stdout, even if rank 0 is killed.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in logging.root.manager.loggerDict:  # each has a level; the ranks say what is wrong
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # using every core would slow them down
    as_json = process.wants_json(arguments)
    strict = {"-I": sys.flags.isolated, "-E": sys.flags.ignore_environment}
    strict |= {"-s": sys.flags.no_user_site}
    flags = [flag for flag, is_set in strict.items() if is_set]
    # The launcher would handle a signal that is ignored, such as SIGHUP under nohup.
    others = (signal.SIGHUP, signal.SIGQUIT)
    heard = [number for number in others if signal.getsignal(number) != signal.SIG_IGN]
    package = str(Path(distprune.__file__).absolute())
    code, text = process.OK, ""
    with tempfile.TemporaryDirectory(prefix="distprune") as folder:
        # Of rank 0 with --json: this process writes its document, or another if there is none.
        logs = DefaultLogsSpecs(folder, redirects={0: Std.OUT} if as_json else Std.NONE)
        config = LaunchConfig(
            1, 1, num_ranks, logs, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", max_restarts=0,
            local_addr="localhost",  # the name of this machine may not resolve
            signals_to_handle=",".join(number.name for number in (*process.SIGNALS, *heard)),
        )  # fmt: skip
        try:
            elastic_launch(config, sys.executable)(*flags, "-c", _START, package, *arguments)
        except ChildFailedError as error:
            codes = _causes(error.failures)
            killed = [rank for rank, number in codes.items() if number < 0]
            code = (
                process.DISTRIBUTED if killed else next(iter(codes.values()), process.DISTRIBUTED)
            )
            if killed:
                name = signal.Signals(-codes[killed[0]]).name
                text = (
                    f"the process of rank {killed[0]} was ended by {name}; if that was SIGKILL, "
                    "the machine may have run out of memory. Run the same command again: it "
                    "continues where this one stopped."
                )
                process.write_error(f"distprune: {text}")
        except SignalException as error:
            is_interrupt = error.sigval == signal.SIGINT
            code = process.INTERRUPTED if is_interrupt else process.TERMINATED
        if as_json:
            _pass_on(Path(folder), code, text)
    return code


def _causes(failures: dict[int, ProcessFailure]) -> dict[int, int]:
    """Exit codes of the ranks that failed by themselves, in the order in which they were seen.

    The launcher ends the others: with SIGTERM, and with SIGKILL 30 s later. Those that miss a rank
    return 5.
    """
    first = next(iter(failures.values()))
    by_signal = (-signal.SIGTERM, process.TERMINATED)
    codes = {}
    for rank, failure in failures.items():
        is_late = failure.timestamp - first.timestamp > _KILLED_AFTER / 2
        code = failure.exitcode
        is_ended = code in by_signal or (code == -signal.SIGKILL and is_late)
        if code != process.DISTRIBUTED and (failure is first or not is_ended):
            codes[rank] = code
    return codes


def _pass_on(folder: Path, code: int, text: str) -> None:
    """Write the JSON document of rank 0; if it has none, or a rank was killed, another one."""
    written = "".join(path.read_text(encoding="utf-8") for path in folder.glob("**/0/stdout.log"))
    try:
        document = json.loads(written)
    except ValueError:
        text = text or "stopped before the end."
    else:
        said = document.get("exit_code") if isinstance(document, dict) else None
        if said == process.TERMINATED != code != process.OK:  # the launcher ended rank 0
            text = text or "another rank failed; stderr says what is wrong."
    if text:
        written = json.dumps({"exit_code": code, "error": text}) + "\n"
    process.write_document(written)


def without_option(arguments: Sequence[str], name: str) -> list[str]:
    """A command line without an option that takes a value."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and not argument.startswith(name + "=") and argument != name:
            kept.append(argument)
        skip = argument == name and not skip
    return kept
