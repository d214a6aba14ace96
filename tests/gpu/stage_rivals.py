"""torch's own global pruning, and its ways to a threshold, up to the size where they fail."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.utils.prune as torch_prune
from device_clock import release, timed
from measuring import Table
from stage import Stage, main
from torch import Tensor, nn

import distprune

NUM_MATRICES = 16
SIZES = (10**7, 10**8, 10**9, 4 * 10**9)
QUICK_SIZES = (10**4, 10**5)


def float32(stage: Stage) -> None:
    compare(stage, torch.float32)


def bfloat16(stage: Stage) -> None:
    compare(stage, torch.bfloat16)


def compare(stage: Stage, dtype: torch.dtype) -> None:
    """Each contestant alone on new modules; what fails is written with its error."""
    rows: list[list[Any]] = []
    columns = ["", "elements", "s", "ns/element", "peak extra B/element", "error"]
    slow: set[str] = set()
    for size in QUICK_SIZES if stage.quick else SIZES:
        for name, contestant in CONTESTANTS.items():
            if name in slow:
                continue
            row: list[Any] = [name, size]
            try:
                seconds, extra = measure(stage, dtype, size, contestant)
                row += [seconds, 1e9 * seconds / size, extra / size, ""]
                if seconds > 10:
                    slow.add(name)
            except (RuntimeError, ValueError) as error:  # too many elements, or too little memory
                text = str(error).splitlines()[0][:70]
                row += [None, None, None, f"{type(error).__name__}: {text}"]
                slow.add(name)
            rows.append(row)
            title = f"{dtype}, {NUM_MATRICES} matrices, amount 0.5"
            stage.table(Table(title, columns, rows, notes=NOTES))
    failed = [row for row in rows if row[0].startswith("distprune") and row[-1]]
    stage.check("distprune's calls work at every size", not failed, str(failed or ""))


NOTES = [
    "whole calls leave a mask and a masked weight for each weight, which are in their memory",
    "the others find the threshold of magnitudes that are gathered already",
    "medians of 3 calls after one that is not counted",
]


def measure(
    stage: Stage, dtype: torch.dtype, size: int, contestant: Callable[[Any], Any]
) -> tuple[float, int]:
    """Median seconds, and highest memory."""
    torch.manual_seed(0)
    side = round((size / NUM_MATRICES) ** 0.5)
    runs = []
    for _ in range(2 if stage.quick else 4):
        release(stage.device)
        modules = [
            nn.Linear(side, side, bias=False, device=stage.device, dtype=dtype)
            for _ in range(NUM_MATRICES)
        ]
        prepared: Any = gather(modules) if contestant in THRESHOLDS else modules
        del modules
        run = timed(stage.device, lambda given=prepared: contestant(given))
        runs.append((run.seconds, run.peak_extra_bytes))
        del prepared, run
    release(stage.device)
    return statistics.median(seconds for seconds, _ in runs[1:]), max(extra for _, extra in runs)


def gather(modules: list[nn.Module]) -> Tensor:
    flat = torch.cat([module.weight.detach().view(-1) for module in modules])
    return flat.abs_()


def by_distprune(modules: list[nn.Module]) -> None:
    pairs = [(module, "weight") for module in modules]
    distprune.global_unstructured(pairs, distprune.L1Unstructured, amount=0.5)


def masks_by_distprune(modules: list[nn.Module]) -> Any:
    tensors = [module.weight.detach() for module in modules]
    return distprune.global_mask(tensors, sum(each.numel() for each in tensors) // 2)


def by_torch(modules: list[nn.Module]) -> None:
    pairs = [(module, "weight") for module in modules]
    torch_prune.global_unstructured(pairs, torch_prune.L1Unstructured, amount=0.5)


def by_kthvalue(flat: Tensor) -> float:
    return torch.kthvalue(flat, flat.numel() // 2).values.item()


def by_topk(flat: Tensor) -> float:
    return torch.topk(flat, flat.numel() // 2, largest=False, sorted=False).values.max().item()


def by_sort(flat: Tensor) -> float:
    return torch.sort(flat).values[flat.numel() // 2 - 1].item()


CONTESTANTS = {
    "distprune, whole call": by_distprune,
    "distprune, ranking and masks": masks_by_distprune,
    "torch.nn.utils.prune, whole call": by_torch,
    "... torch.kthvalue": by_kthvalue,
    "... torch.topk": by_topk,
    "... torch.sort": by_sort,
}
THRESHOLDS = (by_kthvalue, by_topk, by_sort)


if __name__ == "__main__":
    main(float32, bfloat16)
