"""Functions on ranks that share one device: one rank with its own backend, or several over gloo."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_on_ranks(
    function: Callable[..., Any], size: int, device: torch.device, *arguments: Any
) -> list[Any]:
    """Call ``function(device, *arguments)`` on each rank.

    Args:
        function: at the top level of its file; returns what JSON can represent.
        size: the number of ranks. One has the backend of the device, such as NCCL.

    Returns:
        What each rank returned.

    Raises:
        RuntimeError: a rank raised; with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = [
            context.Process(target=_on_rank, args=(function, rank, size, device, folder, arguments))
            for rank in range(size)
        ]
        for each in ranks:
            each.start()
        failed: set[int] = set()
        while any(each.is_alive() for each in ranks) and not failed:
            for rank, each in enumerate(ranks):
                each.join(0.1)
                if each.exitcode not in (None, 0):
                    failed.add(rank)
        for each in ranks:
            if failed:
                each.kill()  # it may wait for the one that failed
            each.join()
        for rank in sorted(failed):
            path = Path(folder, f"error{rank}")
            text = path.read_text() if path.exists() else f"exit code {ranks[rank].exitcode}"
            raise RuntimeError(f"rank {rank}: {text.strip().splitlines()[-1]}\n{text}")
        return [json.loads(Path(folder, f"found{rank}").read_text()) for rank in range(size)]


def _on_rank(
    function: Callable[..., Any], rank: int, size: int, device: torch.device, folder: str,
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    try:
        torch.set_num_threads(1)
        backend = "gloo"
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
            if size == 1:
                backend = dist.get_default_backend_for_device(device.type)
        store = dist.FileStore(str(Path(folder, "store")), size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        found = function(device, *arguments)
        Path(folder, f"found{rank}").write_text(json.dumps(found))
    except BaseException:
        Path(folder, f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may abort an ordinary exit
