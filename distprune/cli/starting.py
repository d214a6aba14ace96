"""``--nproc``: starts the same command in several processes on this machine.

The processes meet at a file, so no port is needed. Their exit codes are passed on, which torchrun
does not do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

import distprune
from distprune.cli import ranks, streams, watching


def run_on_ranks(
    context: typer.Context, num_ranks: int | None, check: Callable[[], object] | None = None
) -> None:
    """Run the command on ``num_ranks`` processes and exit with its code; None: return.

    Args:
        context: of the command.
        num_ranks: the value of ``--nproc``.
        check: called before processes are started, so that what it raises is reported once and
            at once.

    Raises:
        typer.Exit: with the exit code, after all processes have ended.
        typer.BadParameter: this process is a rank already.
    """
    if num_ranks is None:
        return
    if ranks.is_rank():
        raise typer.BadParameter("torchrun has started the processes already; leave it out.")
    if check is not None:
        check()
    raise typer.Exit(start_ranks(without_option(context.obj, "--nproc"), num_ranks))


def start_ranks(arguments: Sequence[str], num_ranks: int) -> int:
    """Run a command of distprune in several processes on this machine, and wait for all.

    The processes run this package with this Python, and never a module of the current folder.
    With ``--json``, exactly one document is written to stdout, even if rank 0 is killed.

    Args:
        arguments: the command and its arguments, without ``--nproc``.
        num_ranks: number of processes.

    Returns:
        The exit code; see :meth:`distprune.cli.watching.Watch.run`.
    """
    as_json = streams.wants_json(arguments)
    with tempfile.TemporaryDirectory(prefix="distprune") as folder:
        own = {
            "WORLD_SIZE": str(num_ranks), ranks.STORE: str(Path(folder, "store")),
            ranks.PARENT: str(os.getpid()), "PYTHONSAFEPATH": "1",
        }  # fmt: skip
        # Ranks that all use every core slow one another down.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **own}
        document = Path(folder, "document.json")
        messages: list[str] = []

        def say(text: str) -> None:
            messages.append(text)
            watching.say(text)

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

        code = watching.Watch(say).run(start, num_ranks)
        if as_json:
            _pass_on(document, code, " ".join(messages))
        return code


def _pass_on(document: Path, code: int, text: str) -> None:
    """Write the JSON document of rank 0; if it wrote none, one with the exit code and a reason."""
    try:
        written = document.read_text(encoding="utf-8")
        json.loads(written)
    except (OSError, ValueError):
        written = json.dumps({"exit_code": code, "error": text or "stopped before the end."}) + "\n"
    streams.write_document(written)


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
