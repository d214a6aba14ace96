"""Seconds and bytes of a call on a device: both wait for the device before and after."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        seconds: wall time until the device has done everything.
        peak_extra_bytes: the highest sum of the sizes of all tensors on the device during the
            call, less that before it. What the call returns is in it. 0 on a CPU.
        result: what it returned.
    """

    seconds: float
    peak_extra_bytes: int
    result: Any


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def allocated(device: torch.device) -> int:
    """Bytes of tensors on the device. 0 on a CPU."""
    return 0 if device.type == "cpu" else torch.accelerator.memory_allocated(device)


def timed(device: torch.device, call: Callable[[], Any]) -> Call:
    synchronize(device)
    before = allocated(device)
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    started = time.perf_counter()
    result = call()
    synchronize(device)
    seconds = time.perf_counter() - started
    peak = 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)
    return Call(seconds, max(peak - before, 0), result)


def release(device: torch.device) -> None:
    """Give what is free back to the device."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def copy_bandwidth(device: torch.device, num_bytes: int, rounds: int = 10) -> float:
    """Bytes per second that a copy of ``num_bytes`` reads and writes, both counted; the median."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    runs = [timed(device, lambda: target.copy_(source)).seconds for _ in range(rounds)]
    return 2 * num_bytes / statistics.median(runs)
