"""How often a call launches kernels and waits for the device: not once per parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from forms import TRITON, each_form, interpret_without_gpu
from measuring import Table
from stage import Stage, main
from torch import nn
from torch.profiler import ProfilerActivity, profile

import distprune

FEW, MANY = 50, 200
QUICK = 4, 12  # interpreted kernels take their time
# Names in a profile of what makes the host wait, by the runtime and by torch.
WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")
WAITING_OPERATIONS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::unique2")
LAUNCHES = ("LaunchKernel", "GraphLaunch")
COPIES = ("Memcpy", "Memset")
ALLOCATIONS = ("cudaMalloc", "cudaHostAlloc", "cudaFree", "hipMalloc")


def ranking(stage: Stage) -> None:
    """Ranking and masks of tensors."""

    def call(modules: list[nn.Module]) -> None:
        tensors = [module.weight.detach() for module in modules]
        distprune.global_mask(tensors, sum(each.numel() for each in tensors) // 2)

    compare(stage, call)


def whole_call(stage: Stage) -> None:
    """``global_unstructured`` of modules, which get masks, hooks and products."""
    compare(stage, prune)


def ranking_of_pruned_modules(stage: Stage) -> None:
    """The second call, with masks in force."""
    compare(stage, prune, before=prune)


def verifying(stage: Stage) -> None:
    """``verify`` of a pruned model."""
    compare(stage, lambda modules: distprune.verify(nn.ModuleList(modules)), before=prune)


def prune(modules: list[nn.Module]) -> None:
    pairs = [(module, "weight") for module in modules]
    distprune.global_unstructured(pairs, distprune.L1Unstructured, amount=0.5)


def compare(
    stage: Stage,
    call: Callable[[list[nn.Module]], None],
    before: Callable[[list[nn.Module]], None] = lambda modules: None,
) -> None:
    few, many = QUICK if stage.quick else (FEW, MANY)
    for name in each_form(stage):
        found = [counts(stage, number, many // number, call, before) for number in (few, many)]
        keys = sorted(set(found[0]) | set(found[1]))
        per = {key: (found[1][key] - found[0][key]) / (many - few) for key in keys}
        rows: list[list[Any]] = [[key, found[0][key], found[1][key], per[key]] for key in keys]
        columns = ["", f"{few} parameters", f"{many} parameters", "per parameter"]
        stage.table(Table(f"{name}: per call", columns, rows))
        waits = sum(per[key] for key in keys if key.startswith("waits"))
        stage.check(f"{name}: no wait per parameter", waits < 0.1, f"{waits:.2g} per parameter")
        if name == TRITON and call is not prune and stage.device.type != "cpu":
            launches = per.get("launches", 0.0)
            stage.check(f"{name}: no launch per parameter", launches < 0.1, f"{launches:.2g}")


def counts(
    stage: Stage,
    number: int,
    height: int,
    call: Callable[[list[nn.Module]], None],
    before: Callable[[list[nn.Module]], None],
) -> Counter[str]:
    """By kind, how many there are in one call, after another call that compiles.

    Args:
        height: of a matrix beside its width. Models are of one size, as the steps of a search
            depend on it.
    """
    size = 16 if stage.quick else 512
    torch.manual_seed(0)
    for _ in range(2):  # the first compiles, and takes memory
        modules: list[nn.Module] = [
            nn.Linear(size, size * height, bias=False, device=stage.device) for _ in range(number)
        ]
        before(modules)
        activities = [ProfilerActivity.CPU]
        if stage.device.type != "cpu":
            torch.accelerator.synchronize(stage.device)
            activities.append(getattr(ProfilerActivity, stage.device.type.upper()))
        with profile(activities=activities) as profiled:
            call(modules)
    found: Counter[str] = Counter()
    for event in profiled.key_averages():
        if event.device_type != torch.autograd.DeviceType.CPU:
            if not event.key.startswith(("Memcpy", "Memset")):
                found["kernels on the device"] += event.count
        elif any(part in event.key for part in WAITS):
            found["waits for the device"] += event.count
        elif event.key in WAITING_OPERATIONS:
            found["waits: torch operations"] += event.count
        elif any(part in event.key for part in LAUNCHES):
            found["launches"] += event.count
        elif any(part in event.key for part in COPIES) and event.key.startswith(("cuda", "hip")):
            found["copies"] += event.count
        elif any(part in event.key for part in ALLOCATIONS):
            found["allocations by the driver"] += event.count
        elif event.key.startswith("aten::"):
            found["torch operations"] += event.count
    return found


if __name__ == "__main__":
    interpret_without_gpu()
    main(ranking, whole_call, ranking_of_pruned_modules, verifying)
