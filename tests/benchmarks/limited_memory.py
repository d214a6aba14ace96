"""Torch's own call where memory is limited.

``python limited_memory.py ELEMENTS DTYPE AMOUNT BYTES`` runs torch's call alone, with that much
address space, and prints what came of it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import data
import torch
import torch.nn.utils.prune as torch_prune
from contestants import Case
from measuring import Table, measured
from torch import nn


def torch_alone(large: Sequence[Case], limit: int) -> Table:
    """Torch's call in a process that may not take more than ``limit`` bytes of address space."""
    rows = []
    for case in large:
        arguments = [case.num_elements, case.dtype_name, case.amount, limit]
        run = subprocess.run(
            [sys.executable, __file__, *map(str, arguments)], capture_output=True, text=True
        )
        rows.append([f"{case.num_elements / 1e6:.0f}M {case.dtype_name}", *_outcome(run)])
    return Table(
        f"torch.nn.utils.prune in a process of its own, with {limit / 1e9:.1f} GB of address space",
        ["", "seconds", "extra B/element", "outcome"],
        rows,
    )


def _outcome(run: subprocess.CompletedProcess) -> list[Any]:
    if run.returncode == 0:
        found = json.loads(run.stdout.splitlines()[-1])
        return [found["seconds"], found["peak extra"], "done"]
    lines = run.stderr.strip().splitlines() or ["nothing on stderr"]
    why = next((line for line in lines if "bad_alloc" in line), lines[-1])
    status = f"exit status {run.returncode}"
    if run.returncode < 0:
        status = signal.Signals(-run.returncode).name
    return [None, None, f"failed with {status}: {_brief(why)}"]


def _brief(message: str) -> str:
    """The sentence about memory, if there is one, without where in torch's code that was."""
    start = max(message.find("DefaultCPUAllocator"), 0)
    return message[start:].partition(". Error code")[0].strip()[:100]


def run_torch_alone(num_elements: int, dtype: torch.dtype, amount: float, limit: int) -> None:
    """In the child: torch's call under a limit, so that it fails and not the machine."""

    def prune(model: nn.Module) -> None:
        torch_prune.global_unstructured(
            data.pairs(model), torch_prune.L1Unstructured, amount=amount
        )

    prune(data.build(100_000, dtype))  # whatever it imports or starts is there then
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    Path("/proc/self/oom_score_adj").write_text("1000")
    model = data.build(num_elements, dtype)
    total = data.num_elements(model)
    run = measured(lambda: prune(model))
    masks = data.masks(model)
    assert masks is not None
    data.check_count(masks, round(amount * total))
    extra = run.peak_extra_bytes / total - 2 * dtype.itemsize
    print(json.dumps({"seconds": run.seconds, "peak extra": extra}))


def address_space() -> int:
    """Of this process now, in bytes; most of it is libraries."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    text = Path("/proc/meminfo").read_text()
    return int(text.split("MemAvailable:")[1].split()[0]) * 1024


if __name__ == "__main__":
    _elements, _dtype, _amount, _limit = sys.argv[1:]
    run_torch_alone(int(_elements), getattr(torch, _dtype), float(_amount), int(_limit))
