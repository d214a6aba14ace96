"""N:M, rows and layers beside one ranking of all: what the group of a call costs.

Every matrix of a language model is pruned by magnitude to half, in all ways, in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import data
import torch
import torch.distributed as dist
from measuring import (
    Measurement,
    Options,
    Table,
    Verdict,
    interleaved,
    measured,
    median_ratio,
    median_seconds,
    slowest,
)
from ranks import shard
from torch import nn

import distprune
from helpers.on_ranks import on_ranks

GLOBAL = "global"
WAYS = {
    GLOBAL: {"amount": 0.5},
    "layer": {"scope": "layer", "amount": 0.5},
    "row": {"scope": "row", "amount": 0.5},
    "2:4": {"pattern": "2:4"},
}
LIMITS = {"row": 5.0, "2:4": 3.0}
RANKS = 2
Runs = dict[str, list[Measurement]]


def tables(options: Options) -> Iterator[Table]:
    num_elements = 1_000_000 if options.quick else 100_000_000
    rounds = options.num_rounds(5)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        found = timed(data.build(num_elements, dtype, multiple=64), rounds)
        yield table(f"one process, {torch.get_num_threads()} threads", name, num_elements, found)
    of_rows = {}
    for wrapping, name in (("fsdp2", "FSDP2"), ("tp", "Tensor parallelism")):
        ranks = on_ranks(measure, RANKS, wrapping, num_elements, rounds, timeout=3000)
        found = {}
        for way in WAYS:
            seconds = slowest([rank[way][0] for rank in ranks])
            found[way] = [Measurement(each, 0, ranks[0][way][1]) for each in seconds]
        of_rows[wrapping] = median_seconds(found["row"])
        yield table(f"{name}, {RANKS} ranks of one thread", "float32", num_elements, found)
    ratio = of_rows["tp"] / of_rows["fsdp2"]
    yield Table(
        "Rows that the sharding cuts: the same model by tensor parallelism, times FSDP2",
        ["ranked together", "times FSDP2"],
        [["row", ratio]],
        [Verdict("rows under tensor parallelism, times FSDP2", ratio, 2.0, is_aim=True)],
        ["The inputs of o_proj and down_proj lie on both ranks, as RowwiseParallel shards them."],
    )


def table(where: str, dtype: str, num_elements: int, found: Runs) -> Table:
    at = f"{where}, {num_elements / 1e6:.3g}M {dtype}"
    ratios = {way: median_ratio(runs, found[GLOBAL]) for way, runs in found.items()}
    return Table(
        f"Groups; {at}, half of the elements are pruned by magnitude",
        ["ranked together", "seconds", "times global", "collectives", "KiB per rank"],
        [[way, median_seconds(found[way]), ratios[way], *found[way][-1].result] for way in WAYS],
        [Verdict(f"{at}: {w}, times global", ratios[w], limit) for w, limit in LIMITS.items()],
        [
            "The whole call, with attaching. Seconds: the slowest rank, medians; ratios: medians "
            "of those of a round."
        ],
    )


def measure(wrapping: str, num_elements: int, rounds: int) -> dict[str, tuple[list[float], list]]:
    """On every rank: by way, the seconds of each round, and what was sent."""
    model = data.build(num_elements, multiple=64)
    shard(model, wrapping)
    found = timed(model, rounds)
    return {way: ([run.seconds for run in runs], runs[-1].result) for way, runs in found.items()}


def timed(model: nn.Module, rounds: int) -> Runs:
    # Every matrix; vectors are one row each, and have no pattern.
    weights = zip(data.pairs(model), data.weights(model), strict=True)
    pairs = [pair for pair, weight in weights if weight.ndim == 2]
    values = [data.local(weight).clone() for weight in data.weights(model)]

    def prune(way: str) -> list[float]:
        report = distprune.global_unstructured(pairs, distprune.L1Unstructured, **WAYS[way])
        return [report.num_collectives, report.bytes_sent / 1024]

    def contestant(way: str) -> Callable[[], Measurement]:
        def call() -> Measurement:
            if dist.is_initialized():
                dist.barrier()
            run = measured(lambda: prune(way))
            data.undo(model, values)
            return run

        return call

    return interleaved({way: contestant(way) for way in WAYS}, rounds)
