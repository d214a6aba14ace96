"""N:M, rows and layers beside one ranking of all: what the group of a call costs.

Every matrix of a language model is pruned by magnitude to half, in all ways, in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import data
import torch
import torch.distributed as dist
from measuring import (
    Bound,
    Cell,
    Measurement,
    Options,
    Table,
    Verdict,
    interleaved,
    measured,
    median_ratio,
    median_seconds,
)
from sharded_models import shard
from torch import Tensor, nn

import distprune
from helpers.on_ranks import on_ranks

GLOBAL = "global"
WAYS: dict[str, dict[str, Any]] = {
    GLOBAL: {"amount": 0.5},
    "layer": {"scope": "layer", "amount": 0.5},
    "row": {"scope": "row", "amount": 0.5},
    "2:4": {"pattern": "2:4"},
}
LIMITS = {"row": 5.0, "2:4": 3.0}
WRAPPINGS = {"fsdp2": "FSDP2", "tp": "Tensor parallelism"}
# Rows under tensor parallelism, of which some are cut, beside FSDP2, which cuts none.
CUT_LIMIT = 2.0
RANKS = 2


def tables(options: Options) -> Iterator[Table]:
    num_elements = 1_000_000 if options.quick else 100_000_000
    rounds = options.num_rounds(5)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        model = data.build(num_elements, dtype, multiple=64)
        found = timed(model, rounds)
        threads = torch.get_num_threads()
        yield table(f"one process, {threads} thread{'s' * (threads > 1)}", name, model, found)
        del model
    shapes = data.LanguageModel(num_elements, multiple=64)
    of_rows = {}
    for wrapping, name in WRAPPINGS.items():
        on_each = on_ranks(measure, RANKS, wrapping, num_elements, rounds, timeout=3000)
        found = {
            way: [
                Measurement(max(seconds), 0, 0, sent[0])
                for seconds, sent in (
                    zip(*each, strict=True)
                    for each in zip(*(of_rank[way] for of_rank in on_each), strict=True)
                )
            ]
            for way in WAYS
        }
        of_rows[wrapping] = found["row"]
        yield table(f"{name}, {RANKS} ranks of one thread", "float32", shapes, found)
    ratio = median_seconds(of_rows["tp"]) / median_seconds(of_rows["fsdp2"])
    bound = Bound("rows under tensor parallelism, times FSDP2", CUT_LIMIT, is_aim=True)
    yield Table(
        "Rows that the sharding cuts: the same model by tensor parallelism, times FSDP2",
        ["ranked together", "times FSDP2"],
        [["row", ratio]],
        [Verdict(bound, ratio)],
        ["The inputs of o_proj and down_proj lie on both ranks, as RowwiseParallel shards them."],
    )


def table(where: str, dtype: str, model: nn.Module, found: dict[str, list[Measurement]]) -> Table:
    num_elements = sum(weight.numel() for weight in matrices(model))
    at = f"{where}, {num_elements / 1e6:.3g}M {dtype}"
    rows: list[list[Cell]] = []
    verdicts = []
    for way, runs in found.items():
        ratio = median_ratio(runs, found[GLOBAL])
        collectives, num_bytes = runs[-1].result
        rows.append([way, median_seconds(runs), ratio, collectives, num_bytes / 1024])
        if way in LIMITS:
            verdicts.append(Verdict(Bound(f"{at}: {way}, times global", LIMITS[way]), ratio))
    return Table(
        f"Groups; {at}, half of the elements are pruned by magnitude",
        ["ranked together", "seconds", "times global", "collectives", "KiB per rank"],
        rows,
        verdicts,
        [
            "The whole call, with attaching. Seconds: the slowest rank, medians; ratios: medians "
            "of those of a round."
        ],
    )


def measure(
    wrapping: str, num_elements: int, rounds: int
) -> dict[str, list[tuple[float, tuple[int, int]]]]:
    """On every rank."""

    model = data.build(num_elements, multiple=64)
    shard(model, wrapping)
    found = timed(model, rounds)
    return {way: [(each.seconds, each.result) for each in runs] for way, runs in found.items()}


def timed(model: nn.Module, rounds: int) -> dict[str, list[Measurement]]:
    def contestant(way: str) -> Callable[[], Measurement]:
        def call() -> Measurement:
            if dist.is_initialized():
                dist.barrier()
            run = measured(lambda: prune(model, way))
            data.undo(model)
            return run

        return call

    return interleaved({way: contestant(way) for way in WAYS}, rounds)


def prune(model: nn.Module, way: str) -> tuple[int, int]:
    report = distprune.global_unstructured(
        matrix_pairs(model), distprune.L1Unstructured, **WAYS[way]
    )
    return report.num_collectives, report.bytes_sent


def matrix_pairs(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every matrix; vectors are one row each, and have no pattern."""
    weights = data.weights(model)
    return [
        pair for pair, weight in zip(data.pairs(model), weights, strict=True) if weight.ndim == 2
    ]


def matrices(model: nn.Module) -> list[Tensor]:
    return [weight for weight in data.weights(model) if weight.ndim == 2]
