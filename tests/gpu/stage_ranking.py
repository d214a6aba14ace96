"""Ranking and masks of 8 billion elements, beside a copy: seconds, bandwidth, memory.

What has to move is each score once, and a mask of one byte per element. The share of the bandwidth
is that of a copy of 4 GB on the same device in the same process.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import device_clock
import torch
from device_clock import copy_bandwidth, timed
from llama_shapes import check_cut, weights
from measuring import Table
from stage import Stage, main
from torch import Tensor, nn

import distprune


def copy(stage: Stage) -> None:
    """What the device's memory can do."""
    num_bytes = 1 << (16 if stage.quick else 32)
    found = copy_bandwidth(stage.device, num_bytes)
    stage.figure("copy bandwidth, read and written", found / 1e9, "GB/s")


def bfloat16_by_magnitude(stage: Stage) -> None:
    measure(stage, torch.bfloat16)


def float32_by_magnitude(stage: Stage) -> None:
    measure(stage, torch.float32)


def bfloat16_random(stage: Stage) -> None:
    """Random scores: nothing is read."""
    measure(stage, torch.bfloat16, scores="random")


def measure(stage: Stage, dtype: torch.dtype, **options: Any) -> None:
    """Seconds, bandwidth and memory; the masks are checked."""
    bandwidth = copy_bandwidth(stage.device, 1 << (16 if stage.quick else 32))
    tensors = as_many_as_fit(dtype, stage)
    n = sum(each.numel() for each in tensors.values())
    must_move = n * (1 if options else dtype.itemsize + 1)
    title = f"{n / 1e9:.3g} billion {dtype} elements, {len(tensors)} matrices, half of them kept"
    columns = ["first s", "median s", "ns/element", "share of copy", "extra B/element"]
    found, first, times, extra = run_all(stage, tensors, n, options)
    median = statistics.median(times)
    share = must_move / median / bandwidth
    rows = [[first, median, 1e9 * median / n, share, (extra - n) / n]]
    stage.table(Table(title, columns, rows, notes=NOTES))
    stage.figure("seconds", median, "s")
    if not options:
        wrong = check_cut(list(tensors.values()), found, n // 2)
        stage.check("exactly the largest are kept", wrong is None, wrong or "")


NOTES = [
    "share of copy: bytes that have to move per second, beside the bandwidth of a copy",
    "extra: highest sum of all tensors during the call, less the weights and the masks",
    "first: with what is compiled and allocated then",
]


def run_all(
    stage: Stage, tensors: dict[str, Tensor], n: int, options: dict[str, Any]
) -> tuple[list[Tensor], float, list[float], int]:
    """Masks, seconds of the first call and of the others, and the highest memory of the others."""

    def call() -> list[Tensor]:
        torch.manual_seed(0)
        return list(distprune.global_mask(tensors, n // 2, **options).masks.values())

    first = timed(stage.device, call)
    times, peaks = [], []
    masks = first.result
    seconds, first = first.seconds, None
    for _ in range(1 if stage.quick else 5):
        masks = None  # its memory is used again
        run = timed(stage.device, call)
        times.append(run.seconds)
        peaks.append(run.peak_extra_bytes)
        masks = run.result
        del run
    assert masks is not None
    return masks, seconds, times, max(peaks)


def as_many_as_fit(dtype: torch.dtype, stage: Stage) -> dict[str, Tensor]:
    """All layers of the model, or fewer, so that weights and twice the masks leave some room."""
    layers = 32
    if stage.device.type != "cpu":
        device_clock.release(stage.device)
        free, _ = torch.get_device_module(stage.device).mem_get_info(stage.device)
        per_layer, others = 218_103_808, 2 * 128_256 * 4096
        fits = int(0.8 * free / (dtype.itemsize + 2) - others) // per_layer
        layers = min(layers, max(fits, 1))
    if layers < 32:
        stage.say(f"{layers} of 32 layers: more do not fit")
    return weights(dtype, stage.device, quick=stage.quick, num_layers=layers)


def whole_call(stage: Stage) -> None:
    """Modules pruned by one call, with masks of the weights' dtype and masked weights."""
    tensors = as_many_as_fit(torch.bfloat16, stage)
    if not stage.quick:  # a mask and a product for each weight
        names = list(tensors)[: len(tensors) // 2]
        tensors = {name: tensors[name] for name in names}
        device_clock.release(stage.device)
    modules = []
    for tensor in tensors.values():
        module = nn.Module()
        module.weight = nn.Parameter(tensor, requires_grad=False)
        modules.append(module)
    pairs = [(module, "weight") for module in modules]
    n = sum(tensor.numel() for tensor in tensors.values())
    runs: dict[str, Callable[[], Any]] = {
        "prune, first in the process": lambda: distprune.global_unstructured(
            [(nn.Linear(512, 512, device=stage.device, dtype=torch.bfloat16), "weight")],
            distprune.L1Unstructured,
            amount=0.5,
        ),
        "prune": lambda: distprune.global_unstructured(pairs, distprune.L1Unstructured, amount=0.5),
        "remove": lambda: [distprune.remove(module, "weight") for module in modules],
    }
    for what, call in runs.items():
        run = timed(stage.device, call)
        stage.figure(f"{what}: seconds (of {n / 1e9:.3g} billion)", run.seconds, "s")
        stage.figure(f"{what}: peak extra B/element", run.peak_extra_bytes / n)
    zeros = sum(int((module.weight == 0).sum()) for module in modules)
    stage.check("half of all elements are zero", zeros == round(0.5 * n), f"{zeros} of {n}")


if __name__ == "__main__":
    main(copy, bfloat16_by_magnitude, float32_by_magnitude, bfloat16_random, whole_call)
