"""Compare every rank's masks bit for bit with those of a single process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from jobs.processes import Job, run_alone, sum_over_ranks

from .comparison import Cell
from .pruning import PruningStep
from .settings import Settings

MASKS_FILE = "masks.safetensors"


@dataclass(frozen=True, slots=True)
class MaskComparison:
    """How one pruning's masks compare, summed over ranks; replicas count once per rank."""

    method: str
    sparsity: float
    num_compared: int
    num_differing: int


def compare_with_single_process(
    steps: list[PruningStep], settings: Settings, job: Job, folder: Path
) -> list[MaskComparison]:
    """Repeat all prunings in a lone child process, then let each rank compare what it holds."""
    if job.rank == 0:
        plan_file = folder / "plan.json"
        plan_file.write_text(json.dumps(_plan(steps, settings), indent=2))
        run_alone("tiny_llama.lone_pruning", str(plan_file))
    dist.barrier()

    comparisons = []
    with safe_open(folder / MASKS_FILE, framework="pt") as lone_masks:
        for step in steps:
            counts = _count_differing(step.masks, step.key, lone_masks, job)
            comparisons.append(MaskComparison(step.method, step.sparsity, *counts))
    return comparisons


def count_differing_of_cells(
    cells: list[Cell], settings: Settings, job: Job, folder: Path
) -> tuple[int, int]:
    """Repeat all prunings of a comparison in a lone child process.

    Args:
        folder: with the weights and scores of the comparison.

    Returns:
        Mask elements compared and differing, over all cells and ranks.
    """
    if job.rank == 0:
        facts = [
            {"criterion": cell.criterion, "scope": cell.scope, "key": cell.key,
             "amount": cell.report.num_pruned_now}
            for cell in cells
        ]  # fmt: skip
        plan = {
            "exclude": list(settings.exclude),
            "seed": settings.seed,
            "masks_file": MASKS_FILE,
            "cells": facts,
        }
        plan_file = folder / "plan.json"
        plan_file.write_text(json.dumps(plan, indent=2))
        run_alone("tiny_llama.lone_comparison", str(plan_file))
    dist.barrier()
    with safe_open(folder / MASKS_FILE, framework="pt") as lone_masks:
        counts = [_count_differing(cell.masks, cell.key, lone_masks, job) for cell in cells]
    return sum(compared for compared, _ in counts), sum(differing for _, differing in counts)


def _count_differing(
    masks: dict[str, Tensor], key: str, lone_masks: safe_open, job: Job
) -> tuple[int, int]:
    """Compare what each rank holds of the masks of one pruning. Collective.

    Args:
        masks: this rank's, by parameter name.
        key: of the pruning; the single process saved its masks as `{key}/{parameter}`.

    Returns:
        Elements compared and differing, summed over ranks.
    """
    num_compared = num_differing = 0
    for name, mask in masks.items():
        local, lone = _same_part(mask, lone_masks.get_tensor(f"{key}/{name}"))
        num_compared += local.numel()
        num_differing += int((local != lone.to(local)).sum())
    return sum_over_ranks(job, num_compared), sum_over_ranks(job, num_differing)


def _plan(steps: list[PruningStep], settings: Settings) -> dict[str, object]:
    """What a lone process needs to know to prune in the same way."""
    by_method: dict[str, list[dict[str, object]]] = {}
    for step in steps:
        facts = {name: getattr(step, name) for name in ("key", "amount", "seed", "state_file")}
        by_method.setdefault(step.method, []).append(facts)
    return {"exclude": list(settings.exclude), "masks_file": MASKS_FILE, "steps": by_method}


def _same_part(mask: Tensor, lone_mask: Tensor) -> tuple[Tensor, Tensor]:
    """What this rank holds of a mask, and the same part of the whole mask: all, for a replica.

    torch's own `distribute_tensor` cuts the whole one, so that a wrong slice in distprune
    cannot hide itself.
    """
    if isinstance(mask, DTensor):
        lone_mask = distribute_tensor(
            lone_mask.to(mask.device), mask.device_mesh, mask.placements, src_data_rank=None
        ).to_local()
        mask = mask.to_local()
    if mask.shape != lone_mask.shape:
        raise ValueError(f"a mask has shape {mask.shape}, expected {lone_mask.shape}.")
    return mask, lone_mask
