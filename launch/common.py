"""What the scripts of this folder share: the process group, tables and text."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from distprune.files.team import Progress

T = TypeVar("T")
# accelerate sets MASTER_ADDR if it is asked for several processes, and RANK if it starts them.
_ALONE = (
    "Warning: this is the only rank, though a launcher was asked for several processes: it set "
    "MASTER_ADDR and no RANK. `accelerate launch --cpu` starts one process, whatever "
    "--num_processes says. For N processes on the CPU: ACCELERATE_USE_CPU=true accelerate launch "
    "--multi_gpu --num_processes N SCRIPT, or torchrun --nproc-per-node N SCRIPT."
)


@dataclass(frozen=True, slots=True)
class Job:
    """This process's place in the job."""

    rank: int
    num_ranks: int
    device: torch.device
    started: float  # seconds, time.monotonic()

    def say(self, text: str) -> None:
        """Print on rank 0 only, with the seconds since the start."""
        if self.rank == 0:
            print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def progress(self, label: str) -> Callable[[Progress], None]:
        """A callback that prints the progress of a run about ten times."""
        printed = 0

        def report(progress: Progress) -> None:
            nonlocal printed
            tenths = 10 * progress.num_done // progress.total
            if tenths > printed:
                self.say(f"{label}: {progress.num_done}/{progress.total} {progress.unit}")
            printed = tenths

        return report

    def on_rank_0(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0 only; every rank gets its result, or its exception."""
        found: list[Any] = [None, None]
        if self.rank == 0:
            try:
                found[0] = function()
            except Exception as error:  # the other ranks wait for an answer
                found[1] = error
        dist.broadcast_object_list(found, src=0, device=self.device)
        if found[1] is not None:
            raise found[1]
        return cast("T", found[0])


def join() -> Job:
    """Join the launcher's process group; without a launcher, make a group of one.

    Every rank gets its own GPU and NCCL where this machine has enough GPUs for its ranks, else
    all get the CPU and gloo.
    """
    started = time.monotonic()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.device_count() >= num_local_ranks:
        device, backend = torch.device("cuda", local_rank), "nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    job = Job(dist.get_rank(), dist.get_world_size(), device, started)
    if "RANK" not in os.environ and "MASTER_ADDR" in os.environ:
        job.say(_ALONE)
    return job


def leave(*, failed: bool = False) -> NoReturn:
    """End this process; `failed` is the same on every rank.

    The interpreter's own exit is skipped: gloo's threads may outlive the group, and now and then
    abort a process that has done all its work ("terminate called without an active exception").
    """
    dist.barrier()  # a fast rank must not close connections that a slow one still needs
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(failed))


def markdown_table(rows: list[tuple[str, ...]]) -> str:
    """Aligned, so that it reads well in a terminal too; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: tuple[str, ...]) -> str:
        text, *numbers = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        return " | ".join(["| " + text, *(n.strip().rjust(len(n)) for n in numbers)]) + " |"

    rules = ["-" * (width + 1) for width in widths]
    rule = "|" + rules[0] + "-|" + ":|".join(rules[1:]) + ":|"
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])


def python_sources(one_in: int) -> tuple[list[Path], list[Path]]:
    """The .py files of Python's standard library, without tests: to train on, and held out.

    Args:
        one_in: about one file in so many is held out, by a hash of its name: a file stays on its
            side when others come and go between versions of Python.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    train, held_out = [], []
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if not skipped & set(name.parts):
            digest = hashlib.sha256(name.as_posix().encode()).digest()
            (train if digest[0] % one_in else held_out).append(file)
    return train, held_out
