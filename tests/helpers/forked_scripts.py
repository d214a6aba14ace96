"""Run scripts as new processes, or on ranks that are forked from one that has imported things."""

import contextlib
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distprune import testing

ROOT = Path(__file__).resolve().parents[2]


def environment(**more: str) -> dict[str, str]:
    """The variables of a process that imports the package of the checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def start(*arguments: object, **variables: str) -> subprocess.Popen:
    """Python in a process of its own; its output is text."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**variables),
    )


def end_of(process: subprocess.Popen) -> tuple[int, str, str]:
    """Exit status, output and errors."""
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def output_of(*command: object, code: int = 0, **options: Any) -> str:
    """What a program prints, which has to end with a code; options of subprocess.run."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == code, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port on which a store may listen, and which the system gives to no other program."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("localhost", 0))
        yield held.getsockname()[1]


def run_forked(script: Path, *arguments: object, num_ranks: int = 1) -> tuple[int, str]:
    """Exit status and output of a Python script; without a launcher, on ranks that meet by env://."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(testing._PRELOAD)
    settings: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder, held_port() as port:
        group: dict[str, object] = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        group |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        processes = []
        for rank in range(num_ranks):
            if num_ranks > 1:
                settings |= group | {"RANK": rank, "LOCAL_RANK": rank}
            given = [str(script), list(map(str, arguments)), f"{folder}/{rank}"]
            texts = {name: str(value) for name, value in settings.items()}
            processes.append(
                context.Process(target=_be_a_script, args=(*given, texts), daemon=True)
            )
            processes[-1].start()
        for process in processes:
            process.join(200)
            process.kill()
            process.join()
        printed = "".join(Path(f"{folder}/{rank}").read_text() for rank in range(num_ranks))
    return next((p.exitcode for p in processes if p.exitcode), 0), printed


def _be_a_script(script: str, arguments: list[str], output: str, settings: dict[str, str]) -> None:
    """In a process of its own; the script may end it."""
    import torch

    torch.set_num_threads(1)
    os.environ.update(settings)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
