"""``verify`` of 100 million parameters on 2 ranks, beside the pruning whose masks it checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import data
import torch
import torch.distributed as dist
from gloo_ranks import on_gloo_ranks
from measuring import (
    Bound,
    Cell,
    CheckFailed,
    Options,
    Table,
    Verdict,
    measured,
    median_ratio,
    median_seconds,
)
from ranks import slowest
from sharded_models import prune, shard, undo
from torch import nn

import distprune

MAX_KIB = 64
WRAPPINGS = ("fsdp2", "tp", "replicas")


def tables(options: Options) -> Iterator[Table]:
    size = 1_000_000 if options.quick else 100_000_000
    rows: list[list[Cell]] = []
    ratios, most_bytes = {}, 0
    for wrapping in WRAPPINGS:
        rounds = options.num_rounds(5)
        found = on_gloo_ranks(measure, 2, wrapping, size, rounds, timeout=900)
        pruning, verifying = slowest(found, "prune"), slowest(found, "verify")
        ratios[wrapping] = median_ratio(verifying, pruning)
        num_bytes = found[0]["bytes"]
        most_bytes = max(most_bytes, num_bytes)
        rows.append(
            [
                wrapping, size, median_seconds(pruning), median_seconds(verifying),
                ratios[wrapping], found[0]["collectives"], num_bytes / 1024,
                max(each["peak bytes"] for each in found) / 1e6,
            ]
        )  # fmt: skip
    yield Table(
        "verify, beside one pruning, on 2 gloo ranks of one thread each, float32",
        [
            "wrapping", "elements", "prune s", "verify s", "verify / prune", "collectives",
            "KiB per rank", "peak MB per rank",
        ],
        rows,
        [
            *(
                Verdict(Bound(f"{wrapping}, 2 ranks: verify in prunings", 1), ratio)
                for wrapping, ratio in ratios.items()
            ),
            Verdict(Bound("verify: KiB sent per rank", MAX_KIB), most_bytes / 1024),
        ],
        ["Everything is measured. Seconds: the slowest rank, medians; ratios are of a round."],
    )  # fmt: skip


def measure(wrapping: str, size: int, rounds: int) -> dict[str, Any]:
    """On every rank: check that a changed mask is found, then time."""
    model: nn.Module = data.build(size, torch.float32)
    if wrapping != "replicas":
        shard(model, wrapping)
    targets = data.pairs(model)
    prune(targets)
    report = distprune.verify(model)
    _check_that_changes_are_found(model, targets)
    undo(model)

    def timed(call: Callable[[], Any]) -> tuple[float, float, int]:
        dist.barrier()
        measurement = measured(call, release=False)
        return measurement.seconds, 0.0, measurement.peak_extra_bytes

    # A pruning has to come before what verifies it, so a round is always in this order.
    found: dict[str, list[Any]] = {"prune": [], "verify": []}
    for _ in range(rounds):
        found["prune"].append(timed(lambda: prune(targets).num_pruned))
        found["verify"].append(timed(lambda: distprune.verify(model).num_pruned))
        undo(model)
    return {
        "rounds": {name: [each[:2] for each in several] for name, several in found.items()},
        "peak bytes": max(peak for *_, peak in found["verify"]),
        "collectives": report.num_collectives,
        "bytes": report.bytes_sent,
    }


def _check_that_changes_are_found(model: nn.Module, targets: list[tuple[nn.Module, str]]) -> None:
    module, name = targets[1]
    mask = module._buffers[f"{name}_mask"]
    local = mask.to_local() if hasattr(mask, "to_local") else mask
    first = local.view(-1)[:1]
    kept = first.clone()
    if dist.get_rank() == 0:
        first.copy_(kept == 0)
    if distprune.verify(model, raise_errors=False).ok:
        raise CheckFailed("a mask that was changed on one rank is not found")
    first.copy_(kept)
