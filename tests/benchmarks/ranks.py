"""Several ranks: time, memory and communication, beside gathering everything on every rank.

The rival is the only other way to the same masks: make every tensor whole on every rank, and
call torch.nn.utils.prune there. The masks of all ranks are compared with the oracle's before
anything is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import data
import torch
import torch.distributed as dist
import torch.nn.utils.prune as torch_prune
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
from sharded_models import AMOUNT, check_local_masks, local_like, placed, prune, shard
from torch import nn
from torch.distributed.tensor import DTensor

from helpers.on_ranks import on_ranks


def tables(options: Options) -> Iterator[Table]:
    yield against_gathering(options)


@dataclass(frozen=True)
class Case:
    """A sharded language model; the rival takes 50 bytes per element, on every rank."""

    wrapping: str
    num_ranks: int
    num_elements: int
    dtype: str = "float32"
    has_rival: bool = True


def cases(quick: bool) -> list[Case]:
    if quick:
        return [Case("fsdp2", 2, 1_000_000), Case("tp", 2, 1_000_000)]
    small, large = 10_000_000, 100_000_000
    found = [
        Case(wrapping, num_ranks, size, has_rival=num_ranks < 4 or size == small)
        for size in (small, large)
        for wrapping in ("fsdp2", "tp")
        for num_ranks in (1, 2, 4)
    ]
    return [*found, Case("fsdp2", 2, large, "bfloat16")]


def against_gathering(options: Options) -> Table:
    """Time and memory of one call, and of the rival."""
    rows: list[list[Cell]] = []
    headline: dict[str, float] = {}
    most_collectives, most_bytes, extra = 0, 0, []
    for case in cases(options.quick):
        # The rival takes half a minute at the large size.
        rounds = options.num_rounds(3) if case.num_elements < 5e7 else min(options.num_rounds(2), 2)
        found = on_ranks(measure_case, case.num_ranks, vars(case), rounds, timeout=900)
        ours, naive = (slowest(found, name) for name in ("distprune", "naive"))
        peak = max(each["peak bytes per local element"]["distprune"] for each in found)
        first = found[0]
        times = median_ratio(naive, ours) if naive else None
        naive_peak = max(each["peak bytes"].get("naive", 0) for each in found) / 1e9
        rows.append(
            [
                case.wrapping, case.num_ranks, case.num_elements, case.dtype,
                median_seconds(naive) if naive else None, median_seconds(ours), times,
                first["collectives"], first["bytes"] / 1024,
                naive_peak or None, peak,
            ]
        )  # fmt: skip
        most_collectives = max(most_collectives, first["collectives"])
        most_bytes = max(most_bytes, first["bytes"])
        if case.wrapping == "fsdp2" and case.num_ranks == 2:
            if case.num_elements > 5e7 or options.quick:
                extra.append(peak)
            if case.dtype == "float32" and times is not None:
                headline = {"times": times, "size": case.num_elements}
    at = f"FSDP2, 2 ranks, {headline['size']:,} elements"
    return Table(
        f"Sharded models on gloo ranks of one thread each, amount={AMOUNT}",
        [
            "wrapping", "ranks", "elements", "dtype", "gather + torch s", "distprune s", "times",
            "collectives", "KiB per rank", "gather + torch GB per rank",
            "extra bytes per local element",
        ],
        rows,
        [
            Verdict(Bound(f"{at}, fp32: times faster", 100, at_least=True), headline["times"]),
            Verdict(Bound("KiB sent per rank, worst of all rows", 256), most_bytes / 1024),
            Verdict(Bound("collectives, worst of all rows", 16), most_collectives),
            Verdict(Bound(f"{at}: extra bytes per local element", 0.2), max(extra)),
        ],
        [
            "Everything is measured. Seconds: the slowest rank, medians.",
            "GB and extra bytes: rise of the resident set at its peak, of the worst rank; for "
            "distprune without the masks, and the masked weights of TP's hooks, that it leaves.",
            "Gathering and torch at 100 million elements takes more memory than 4 ranks have here.",
        ],
    )  # fmt: skip


def slowest(found: Sequence[dict[str, Any]], name: str) -> list[Measurement]:
    """Of the ranks, round by round."""
    if name not in found[0]["rounds"]:
        return []
    by_round = zip(*(each["rounds"][name] for each in found), strict=True)
    return [Measurement(max(each), 0, 0) for each in by_round]


def measure_case(fields: dict[str, Any], rounds: int) -> dict[str, Any]:
    """On every rank: check, then time."""
    case = Case(**fields)
    model = data.build(case.num_elements, getattr(torch, case.dtype))
    values = data.weights(model)
    expected = data.oracle(values, AMOUNT)
    keeps = [
        torch.from_numpy(keep).view(value.shape)
        for keep, value in zip(data.expected_masks(values, expected), values, strict=True)
    ]
    del values
    shard(model, case.wrapping)
    keeps = [local_like(keep, p) for keep, (p, _) in zip(keeps, placed(model), strict=True)]
    targets = data.pairs(model)
    report = prune(targets)
    data.check_report(report, expected)
    check_local_masks(model, keeps)
    left_bytes = data.undo(model)
    num_local = sum(data.local(p).numel() for p, _ in placed(model))

    def ours() -> list[tuple[float, int]]:
        found = []
        for _ in range(3):  # it is quick: one call is not more than noise
            dist.barrier()
            measurement = measured(lambda: prune(targets).num_pruned_now)
            if measurement.result != expected.num_pruned:
                raise CheckFailed(f"{measurement.result:,} elements pruned in a later round")
            data.undo(model)
            found.append((measurement.seconds, measurement.peak_extra_bytes - left_bytes))
        return found

    def naive() -> list[tuple[float, int]]:
        dist.barrier()
        measurement = measured(lambda: gather_and_prune(model))
        if measurement.result != expected.num_pruned:
            raise CheckFailed(f"gathering and torch pruned {measurement.result:,} elements")
        return [(measurement.seconds, measurement.peak_extra_bytes)]

    contestants = {"naive": naive, "distprune": ours} if case.has_rival else {"distprune": ours}
    found = {
        name: [each for several in results for each in several]
        for name, results in interleaved(contestants, rounds).items()
    }
    peaks = {name: statistics.median(peak for _, peak in each) for name, each in found.items()}
    return {
        "rounds": {name: [each[0] for each in several] for name, several in found.items()},
        "peak bytes": peaks,
        "peak bytes per local element": {name: peak / num_local for name, peak in peaks.items()},
        "collectives": report.num_collectives,
        "bytes": report.bytes_sent,
    }


def gather_and_prune(model: nn.Module) -> int:
    """What one does without this library: every rank gets everything and prunes it."""
    whole = nn.ModuleList()
    for parameter, _ in placed(model):
        parameter = parameter.detach()
        if isinstance(parameter, DTensor):
            # torch 2.11 joins columns to a tensor with gaps, which its own pruning cannot view.
            parameter = parameter.full_tensor().contiguous()
        whole.append(data.Weight(parameter))
    targets = [(layer, "weight") for layer in whole]
    torch_prune.global_unstructured(targets, torch_prune.L1Unstructured, amount=AMOUNT)
    return sum(int((layer.weight_mask == 0).sum()) for layer in whole)
