"""Call a function on ranks that are new processes of one thread each."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any


def on_ranks(
    function: Callable[..., Any], size: int, *args: Any, device: str = "cpu", timeout: float = 600.0
) -> list[Any]:
    """What ``function(*args)`` returns on rank 0, 1, ...: plain data that JSON can hold.

    Args:
        device: its type. A rank that is alone has the backend of the device, such as NCCL; several
            share one device, over gloo.

    Raises:
        TimeoutError: not every rank came to its end in ``timeout`` seconds; all are killed.
        Exception: what a rank raised.
    """
    # Here, so that a process that starts is not slower than it has to be.
    import torch.multiprocessing as mp

    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        arguments = size, folder, device, timeout, function, args
        context = mp.spawn(_run, arguments, size, join=False)
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{function.__name__} on {size} ranks: {timeout:g} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]


def _run(
    rank: int, size: int, folder: str, device: str, timeout: float, function: Callable, args: tuple
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backend = "gloo"
    if device != "cpu":
        torch.accelerator.set_device_index(0)
        if size == 1:
            backend = dist.get_default_backend_for_device(device)
    store = dist.FileStore(str(Path(folder, "store")), size)
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, rank=rank, world_size=size, store=store, timeout=limit)
    dist.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps(function(*args)))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of backends may abort an ordinary exit
