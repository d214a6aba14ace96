"""Functions on ranks that share one device: one rank with its own backend, or several over gloo."""

from __future__ import annotations

import faulthandler
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
from torch import Tensor
from torch.distributed.tensor import DTensor


class Crash(RuntimeError):
    """A signal ended a rank, such as that of a segmentation fault."""


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
        Crash: a signal ended a rank; with the stacks of its threads.
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
            path, code = Path(folder, f"error{rank}"), ranks[rank].exitcode
            if path.exists():
                text = path.read_text()
                raise RuntimeError(f"rank {rank}: {text.strip().splitlines()[-1]}\n{text}")
            stacks = Path(folder, f"stacks{rank}")
            text = stacks.read_text() if stacks.exists() else ""
            kind = Crash if code is not None and code < 0 else RuntimeError
            raise kind(f"rank {rank}: exit code {code}\n{text}")
        return [json.loads(Path(folder, f"found{rank}").read_text()) for rank in range(size)]


def _on_rank(
    function: Callable[..., Any], rank: int, size: int, device: torch.device, folder: str,
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    stacks = Path(folder, f"stacks{rank}").open("w")  # noqa: SIM115 (it stays open)
    faulthandler.enable(stacks)
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


def whole(tensor: DTensor) -> Tensor:
    """A DTensor that all ranks share by rows, as a whole, on the device of the shards.

    ``full_tensor()`` ends in a segmentation fault where gloo has to gather CUDA tensors: see
    https://github.com/pytorch/pytorch/issues/152645
    """
    local = tensor.to_local()
    parts = [local] * dist.get_world_size()
    if len(parts) > 1:
        dist.all_gather_object(parts, local.cpu())
    return torch.cat(parts).to(local.device)
