"""Processes: joining the group, printing, child processes, leaving."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from distprune.language_models import RunProgress

T = TypeVar("T")
# accelerate sets MASTER_ADDR if it is asked for several processes, and RANK if it starts them.
_ALONE = (
    "Warning: this is the only rank, though a launcher was asked for several processes: it set "
    "MASTER_ADDR and no RANK. `accelerate launch --cpu` starts one process, whatever "
    "--num_processes says. For N processes on the CPU: ACCELERATE_USE_CPU=true accelerate launch "
    "--multi_gpu --num_processes N SCRIPT, or torchrun --nproc-per-node N SCRIPT."
)
LAUNCH_FOLDER = Path(__file__).resolve().parent.parent


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

    def progress(self, label: str) -> Callable[[RunProgress], None]:
        """What prints how far a run over windows is, about ten times. For rank 0."""
        printed = 0

        def report(progress: RunProgress) -> None:
            nonlocal printed
            tenths = 10 * progress.num_done // progress.total
            printed = min(printed, tenths)  # of another run, which has ended
            if tenths > printed:
                printed = tenths
                done = f"{progress.num_done}/{progress.total} {progress.unit}"
                self.say(f"{label}: {done}, {progress.seconds_left:.0f} s left")

        return report

    def of_rank_0(self, find: Callable[[], T]) -> T:
        """What rank 0 finds, on every rank; the others do not look. Collective.

        Raises:
            Exception: what `find` raised on rank 0; on every rank.
        """
        found: list[Any] = [None, None]
        if self.rank == 0:
            try:
                found[0] = find()
            except Exception as error:  # the other ranks wait for an answer
                found[1] = error
        dist.broadcast_object_list(found, src=0, device=self.device)
        if found[1] is not None:
            raise found[1]
        return cast("T", found[0])


def join() -> Job:
    """Join torchrun's process group; without torchrun, be a group of one.

    Every rank gets its own GPU and NCCL where there are enough GPUs for this machine's
    ranks, else all get the CPU and gloo. Warns of a launcher that started too few.
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
        be_group_of_one(backend)
    job = Job(dist.get_rank(), dist.get_world_size(), device, started)
    if "RANK" not in os.environ and "MASTER_ADDR" in os.environ:
        job.say(_ALONE)
    return job


def be_group_of_one(backend: str) -> None:
    """A process group without other processes, and without a port."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def run_alone(module: str, *arguments: str) -> None:
    """Run `python -m module` as a lone process that cannot know of this job's group.

    Raises:
        subprocess.CalledProcessError: the child failed; torchrun then ends the other ranks.
    """
    distributed = ("MASTER_", "TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_", "RANK", "WORLD_SIZE")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(distributed)
    }
    folders = [str(LAUNCH_FOLDER), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)
    subprocess.run([sys.executable, "-m", module, *arguments], env=environment, check=True)


def sum_over_ranks(job: Job, value: int) -> int:
    """The sum of one integer per rank, on every rank."""
    total = torch.tensor(value, dtype=torch.int64, device=job.device)
    dist.all_reduce(total)
    return int(total)


def leave(job: Job, *, failed: bool) -> NoReturn:
    """End this process; the status is 1 on every rank when any rank failed."""
    status = int(sum_over_ranks(job, int(failed)) > 0)
    # A fast rank must not close connections that a slow one still needs.
    dist.barrier()
    quit_group(status)


def quit_group(status: int) -> NoReturn:
    """Destroy the process group and end this process at once.

    The interpreter's own exit is skipped: gloo's threads may outlive the group, and now
    and then abort a process that has done all its work ("terminate called without an
    active exception").
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
