"""What every part of the benchmark measures with, and what it reports.

Machines are noisy, and shared ones more so: contestants run in turn in one process
(:func:`interleaved`), and what counts are ratios within a round (:func:`median_ratio`).
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
Cell = str | int | float | None


class CheckFailed(Exception):
    """A result is not what the oracle says: nothing about it is worth timing."""


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line.

    Attributes:
        quick: small sizes, to see that everything runs; bounds are not judged.
        rounds: how often each contestant runs; None leaves it to the part.
        device: the type of the one that has the weights.
    """

    quick: bool = False
    rounds: int | None = None
    device: str = "cpu"

    def num_rounds(self, default: int) -> int:
        return self.rounds or (1 if self.quick else default)


@dataclass(frozen=True)
class Measurement:
    """One call.

    Attributes:
        seconds: wall time.
        peak_extra_bytes: the highest resident set during the call, less that before it. What the
            call leaves behind is in it.
        result: what the call returned. It stays in memory as long as this does: keep it small.
    """

    seconds: float
    peak_extra_bytes: int
    result: Any = None


def measured(call: Callable[[], Any], *, device: str = "cpu") -> Measurement:
    """Run ``call`` once, from a process without garbage and without pages that malloc kept.

    On another device than a CPU, bytes are those of tensors there, and it is waited for.
    """
    release_memory()
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is resident now
    else:
        torch.accelerator.reset_peak_memory_stats()
    before = _bytes("VmRSS", device)
    synchronize(device)
    started = time.perf_counter()
    result = call()
    synchronize(device)
    seconds = time.perf_counter() - started
    return Measurement(seconds, max(_bytes("VmHWM", device) - before, 0), result)


def synchronize(device: torch.device | str) -> None:
    """Wait until a device has done everything."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()


def _bytes(name: str, device: str) -> int:
    """The present memory of this process, or of its tensors on a device ("VmRSS"); or the peak."""
    if device == "cpu":
        text = Path("/proc/self/status").read_text()
        return int(text.split(name + ":")[1].split()[0]) * 1024
    if name == "VmHWM":
        return torch.accelerator.max_memory_allocated()
    return torch.accelerator.memory_allocated()


def release_memory() -> None:
    """Give everything that is free back to the operating system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def interleaved(contestants: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Call all contestants in turn, ``rounds`` times; every second round backwards.

    Returns:
        What each of them returned, by name, round by round.
    """
    results: dict[str, list[T]] = {name: [] for name in contestants}
    for which in range(rounds):
        for name in list(contestants)[:: 1 if which % 2 == 0 else -1]:
            results[name].append(contestants[name]())
    return results


def median_seconds(measurements: Sequence[Measurement]) -> float:
    return statistics.median(each.seconds for each in measurements)


def median_ratio(numerator: Sequence[Measurement], denominator: Sequence[Measurement]) -> float:
    """The median over all rounds of the ratio of seconds in a round."""
    return statistics.median(
        n.seconds / d.seconds for n, d in zip(numerator, denominator, strict=True)
    )


def slowest(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    """The most seconds of any rank, round by round."""
    return [max(each) for each in zip(*of_ranks, strict=True)]


@dataclass(frozen=True)
class Verdict:
    """What was measured, and what it has to be.

    Attributes:
        text: what is measured, with its unit, size and dtype.
        limit: at least this value, or at most.
        is_aim: not a promise: where it is missed, the benchmark says so and does not fail.
    """

    text: str
    value: float
    limit: float
    at_least: bool = False
    is_aim: bool = False

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(frozen=True)
class Table:
    """What a part found.

    Attributes:
        rows: as many cells as there are columns; None where nothing was measured. A row whose
            figures were computed, and not measured, says so.
    """

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        return "\n".join([self.title, *layout([self.columns, *self.rows]), *self.notes])


def layout(rows: Sequence[Sequence[Cell]]) -> list[str]:
    """Lines of equally wide columns, the first one to the left; the first row is the heading."""
    written = [[_cell(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*written, strict=True)]
    lines = []
    for first, *rest in written:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return lines


def _cell(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value


def machine() -> list[str]:
    """What the figures depend on, beside the code."""
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    huge = pages.read_text().strip() if pages.exists() else "unknown"
    gigabytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in facts if line.startswith("model name")]
    return [
        f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}",
        f"{[*models, platform.machine()][0]}, {os.cpu_count()} cores, {gigabytes:.0f} GB of memory",
        f"{torch.get_num_threads()} threads, transparent huge pages: {huge}",
    ]
