"""Which rank this process is, and its process group.

Ranks are started by torchrun, or by ``--nproc``: see :mod:`distprune.cli.starting`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

from distprune.files.errors import RanksError

# Environment variables of the processes that --nproc starts.
STORE = "DISTPRUNE_STORE"  # the file at which the ranks meet
PARENT = "DISTPRUNE_PARENT"  # the id of the process that started them


def is_leader() -> bool:
    """Whether this process is rank 0 or the only one; it alone writes what concerns all ranks."""
    return os.environ.get("RANK", "0") == "0"


def is_rank() -> bool:
    """Whether torchrun or ``--nproc`` started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_child() -> bool:
    """Whether ``--nproc`` started this process."""
    return PARENT in os.environ


@contextlib.contextmanager
def process_group(timeout: float, backend: str = "gloo") -> Iterator[None]:
    """Join the other ranks, if there are any, in a process group."""
    if not is_rank():
        yield
        return
    import torch.distributed as dist

    store = os.environ.get(STORE)
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
