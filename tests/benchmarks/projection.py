"""global_mask on 100M elements: the first call, calls that begin at the last one, 100 in a row.

A method that projects every few steps pays for it each time. The weights move a little between two
calls, as an optimizer moves them; a good start then needs one read and a few small messages.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import data
import torch
import torch.distributed as dist
from gloo_ranks import on_gloo_ranks
from measuring import (
    Bound,
    Cell,
    CheckFailed,
    Measurement,
    Options,
    Table,
    Verdict,
    interleaved,
    measured,
    median_ratio,
    median_seconds,
)
from sharded_models import AMOUNT, local, local_like, prune, shard, undo
from torch import Tensor

import distprune

NAMES = ("global_unstructured", "first call", "with a start", "with a wrong start")
IN_A_ROW = 100


def tables(options: Options) -> Iterator[Table]:
    size = 1_000_000 if options.quick else 100_000_000
    found = on_gloo_ranks(measure, 2, size, options.num_rounds(5), timeout=3000)
    runs = {
        name: [
            Measurement(max(of_ranks)[0], 0, 0)
            for of_ranks in zip(*(each["rounds"][name] for each in found), strict=True)
        ]
        for name in NAMES
    }
    first = found[0]
    ratios = {name: median_ratio(runs[name], runs["first call"]) for name in NAMES}
    rows: list[list[Cell]] = [
        [
            name,
            median_seconds(runs[name]),
            ratios[name],
            first["collectives"].get(name),
            first["KiB"].get(name),
            max(each["bytes per local element"][name] for each in found),
        ]
        for name in NAMES
    ]
    in_a_row = max(each["in a row"] for each in found)
    rows.append(
        [f"{IN_A_ROW} in a row, each", in_a_row, in_a_row / rows[1][1],
         first["collectives"]["in a row"], first["KiB"]["in a row"], None]
    )  # fmt: skip
    at = f"FSDP2, 2 ranks, {size:,} elements"
    yield Table(
        f"Projections of tensors; {at}, float32, half of the elements are kept",
        ["call", "seconds", "times the first call", "collectives", "KiB per rank",
         "extra bytes per local element"],
        rows,
        [
            Verdict(Bound(f"{at}: a call with a start, times the first", 1.05),
                    ratios["with a start"]),
            Verdict(Bound(f"{at}: a call with a start, collectives", 6),
                    first["collectives"]["with a start"]),
            Verdict(Bound(f"{at}: a call with a start, KiB", 60), first["KiB"]["with a start"]),
            Verdict(Bound(f"{at}: a call with a wrong start, times the first", 2),
                    ratios["with a wrong start"]),
        ],
        [
            "Everything is measured. The masks of the first call are compared with an oracle, and "
            "those of all other calls with a first call on the same values. Seconds: the slowest "
            "rank, medians. Extra bytes: rise of the resident set at its peak; the masks have 1.",
            "Between two calls all weights are scaled by 1 + 0.001 r, r normal. A wrong start is "
            "that of weights which were twice as large.",
        ],
    )  # fmt: skip


def measure(size: int, rounds: int) -> dict[str, Any]:
    """On every rank: check all masks, then time."""
    model = data.build(size)
    whole = data.weights(model)
    cut = data.oracle(whole, AMOUNT)
    expected = [
        torch.from_numpy(keep).view(weight.shape)
        for keep, weight in zip(data.expected_masks(whole, cut), whole, strict=True)
    ]
    k = sum(int(keep.sum()) for keep in expected)
    del whole
    shard(model, "fsdp2")
    targets = data.pairs(model)
    weights = [getattr(module, name) for module, name in targets]
    keeps = [local_like(keep, weight) for keep, weight in zip(expected, weights, strict=True)]
    del expected
    first = distprune.global_mask(weights, k)
    check(first.masks, keeps)
    del keeps
    move(weights, 1.0)
    twice = distprune.global_mask(weights, k).start
    move(weights, -0.5)
    generator = torch.Generator().manual_seed(2)
    collectives: dict[str, int] = {}
    traffic: dict[str, float] = {}
    last = [first.start]
    del first

    def project(name: str, start: Any) -> int:
        found = distprune.global_mask(weights, k, start=start)
        collectives[name] = found.num_collectives
        traffic[name] = found.bytes_sent / 1024
        last[0] = found.start
        return k

    def timed(name: str) -> tuple[float, int]:
        move(weights, 1e-3 * float(torch.randn((), generator=generator)))
        dist.barrier()
        if name == "global_unstructured":
            measurement = measured(lambda: prune(targets).num_pruned_now)
            undo(model)
        else:
            start = {"with a start": last[0], "with a wrong start": twice}.get(name)
            measurement = measured(lambda: project(name, start))
        if not measurement.result:
            raise CheckFailed("nothing was selected")
        return measurement.seconds, measurement.peak_extra_bytes

    # The last call of a round leaves the start of the next: a first call does so, too.
    found = interleaved({name: lambda n=name: timed(n) for name in NAMES}, rounds)
    seconds = []
    for _ in range(IN_A_ROW):
        move(weights, 1e-3 * float(torch.randn((), generator=generator)))
        dist.barrier()
        call = measured(lambda: project("in a row", last[0]), release=False)
        seconds.append(call.seconds)
    for start in (last[0], twice):
        check(
            distprune.global_mask(weights, k, start=start).masks,
            [local(mask) for mask in distprune.global_mask(weights, k).masks],
        )
    num_local = sum(local(weight).numel() for weight in weights)
    peaks = {name: statistics.median(peak for _, peak in each) for name, each in found.items()}
    return {
        "rounds": {name: [each[:1] for each in several] for name, several in found.items()},
        "bytes per local element": {name: peak / num_local for name, peak in peaks.items()},
        "in a row": statistics.median(seconds),
        "collectives": collectives,
        "KiB": traffic,
    }


@torch.no_grad()
def move(weights: list[Tensor], share: float) -> None:
    for weight in weights:
        local(weight).mul_(1 + share)


def check(masks: list[Tensor], keeps: list[Tensor]) -> None:
    for which, (mask, keep) in enumerate(zip(masks, keeps, strict=True)):
        if not torch.equal(local(mask), keep):
            raise CheckFailed(f"rank {dist.get_rank()}: the mask of tensor {which} is wrong")
