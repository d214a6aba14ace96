"""Several ranks: time, memory and communication, beside gathering everything on every rank.

The rival is the only other way to the same masks: make every tensor whole on every rank, and
call torch.nn.utils.prune there. The masks of all ranks are compared with the oracle's before
anything is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import data
import torch
import torch.distributed as dist
import torch.nn.utils.prune as torch_prune
from measuring import (
    CheckFailed,
    Measurement,
    Options,
    Table,
    Verdict,
    interleaved,
    measured,
    slowest,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import distprune
from distprune import PruningReport
from helpers.on_ranks import on_ranks
from helpers.wrappings import whole

AMOUNT = 0.5
COLWISE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
PLAN = {
    "embed_tokens": RowwiseParallel(), "lm_head": ColwiseParallel(), "norm": SequenceParallel(),
    **{f"layers.*.{name}": ColwiseParallel() for name in COLWISE},
    **{f"layers.*.{name}": RowwiseParallel() for name in ("o_proj", "down_proj")},
    **{f"layers.*.{name}": SequenceParallel() for name in ("input_norm", "output_norm")},
}  # fmt: skip
SMALL, LARGE = 10_000_000, 100_000_000


def shard(model: data.LanguageModel, wrapping: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if wrapping == "tp":
        parallelize_module(model, mesh, PLAN, src_data_rank=None)
        return
    for module in (*model.layers, model.embed_tokens, model.lm_head, model):
        fully_shard(module, mesh=mesh)


def prune(targets: Sequence[tuple[nn.Module, str]], amount: float = AMOUNT) -> PruningReport:
    return distprune.global_unstructured(targets, distprune.L1Unstructured, amount=amount)


def cases(options: Options) -> Iterator[tuple[str, int, int, str]]:
    """(wrapping, number of ranks, number of elements, dtype)."""
    for size in (1_000_000,) if options.quick else (SMALL, LARGE):
        for wrapping in ("fsdp2", "tp"):
            for num_ranks in (2,) if options.quick else (1, 2, 4):
                yield wrapping, num_ranks, size, "float32"
    if not options.quick:
        yield "fsdp2", 2, LARGE, "bfloat16"


def tables(options: Options) -> Iterator[Table]:
    rows, rounds = [], options.num_rounds(3)
    for wrapping, num_ranks, size, dtype in cases(options):
        # The rival takes 50 bytes per element, on every rank.
        has_rival = num_ranks < 4 or size < LARGE
        found = on_ranks(measure, num_ranks, wrapping, size, dtype, has_rival, rounds, timeout=900)
        seconds = {
            name: statistics.median(slowest([each["seconds"][name] for each in found]))
            for name in found[0]["seconds"]
        }
        ours, naive = seconds["distprune"], seconds.get("naive")
        rows.append(
            [
                wrapping, num_ranks, size, dtype, naive, ours, naive and naive / ours,
                found[0]["collectives"], found[0]["bytes"] / 1024,
                naive and max(each["peaks"]["naive"] for each in found) / 1e9,
                max(each["peaks"]["distprune"] / each["num_local"] for each in found),
            ]
        )  # fmt: skip
    largest = [row for row in rows if row[:3] == ["fsdp2", 2, rows[-1][2]]]
    at = f"FSDP2, 2 ranks, {rows[-1][2]:,} elements"
    yield Table(
        f"Sharded models on gloo ranks of one thread each, amount={AMOUNT}",
        [
            "wrapping", "ranks", "elements", "dtype", "gather + torch s", "distprune s", "times",
            "collectives", "KiB per rank", "gather + torch GB per rank",
            "extra bytes per local element",
        ],
        rows,
        [
            Verdict(f"{at}, fp32: times faster", largest[0][6], 100, at_least=True),
            Verdict("KiB sent per rank, worst of all rows", max(row[8] for row in rows), 256),
            Verdict("collectives, worst of all rows", max(row[7] for row in rows), 16),
            Verdict(f"{at}: extra bytes per local element", max(r[10] for r in largest), 0.2),
        ],
        [
            "Everything is measured. Seconds: the slowest rank, medians.",
            "GB and extra bytes: rise of the resident set at its peak, of the worst rank; for "
            "distprune without the masks, and the masked weights of TP's hooks, that it leaves.",
            "Gathering and torch at 100 million elements takes more memory than 4 ranks have here.",
        ],
    )  # fmt: skip


def measure(wrapping: str, size: int, dtype: str, has_rival: bool, rounds: int) -> dict[str, Any]:
    """On every rank: check, then time."""
    model = data.build(size, getattr(torch, dtype))
    whole_values = [weight.clone() for weight in data.weights(model)]
    expected = data.oracle(whole_values, AMOUNT)
    shard(model, wrapping)
    values = [data.local(weight).clone() for weight in data.weights(model)]
    targets = data.pairs(model)
    report = prune(targets)
    data.check_report(report, expected)
    data.check_masks(whole_values, [whole(mask) for mask in data.masks(model)], expected)
    del whole_values
    left_bytes = data.undo(model, values)

    def ours() -> Measurement:
        dist.barrier()
        run = measured(lambda: prune(targets).num_pruned_now)
        data.undo(model, values)
        return replace(run, peak_extra_bytes=run.peak_extra_bytes - left_bytes)

    def naive() -> Measurement:
        dist.barrier()
        return measured(lambda: gather_and_prune(model))

    contestants = {"distprune": ours, "naive": naive} if has_rival else {"distprune": ours}
    found = interleaved(contestants, rounds)
    for name, runs in found.items():
        if {run.result for run in runs} != {expected.num_pruned}:
            raise CheckFailed(f"{name} pruned {runs}; expected {expected.num_pruned:,} elements")
    return {
        "seconds": {name: [run.seconds for run in runs] for name, runs in found.items()},
        "peaks": {
            name: statistics.median(run.peak_extra_bytes for run in runs)
            for name, runs in found.items()
        },
        "num_local": sum(value.numel() for value in values),
        "collectives": report.num_collectives,
        "bytes": report.bytes_sent,
    }


def gather_and_prune(model: nn.Module) -> int:
    """What one does without this library: every rank gets everything and prunes it."""
    whole = nn.ModuleList()
    for parameter in data.weights(model):
        if isinstance(parameter, DTensor):
            # torch 2.11 joins columns to a tensor with gaps, which its own pruning cannot view.
            parameter = parameter.full_tensor().contiguous()
        whole.append(data.Weight(parameter))
    targets = [(layer, "weight") for layer in whole]
    torch_prune.global_unstructured(targets, torch_prune.L1Unstructured, amount=AMOUNT)
    return sum(int((layer.weight_mask == 0).sum()) for layer in whole)
