"""``reconstruct`` of one block of a 1B-shaped decoder, on one process and on ranks.

Only the Gram matrices of the inputs grow with the calibration text; what comes after them does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import CheckFailed, Options, Table, Verdict, measured
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import distprune as prune
from distprune.statistics import GramMatrices
from helpers.on_ranks import on_ranks

AMOUNT = 0.5


class Block(nn.Module):
    """The matrices of a decoder layer, of grouped queries, without the attention between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.q, self.o = linear(width, width), linear(width, width)
        self.k, self.v = linear(width, width // 4), linear(width, width // 4)
        self.gate, self.up = linear(width, hidden), linear(width, hidden)
        self.down = linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        self.k(x), self.v(x)
        x = F.rms_norm(x + self.o(torch.tanh(self.q(x))), x.shape[-1:])
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def tables(options: Options) -> Iterator[Table]:
    width, hidden, num_tokens = (64, 256, 512) if options.quick else (2048, 8192, 8192)
    threads = os.cpu_count() or 1
    found = {}
    for name, ranks, dtype in (
        ("one process", 1, "float64"),
        ("one process, float32", 1, "float32"),
        ("FSDP2, 2 ranks", 2, "float64"),
    ):
        arguments = width, hidden, num_tokens, max(1, threads // ranks), dtype
        each = on_ranks(measure, ranks, *arguments, timeout=3600)
        found[name] = {key: max(values[key] for values in each) for key in each[0]}
    rows = [
        [name, *(each[key] for key in ("collect", "mask", "solve", "error", "grams", "peak"))]
        for name, each in found.items()
    ]
    one, _, two = found.values()
    seconds = [each["mask"] + each["solve"] for each in (one, two)]
    yield Table(
        f"reconstruct of a block, {width} inputs, {hidden} hidden units, {num_tokens:,} tokens",
        [
            "", "Gram matrices s", "mask s", "solve s", "mean relative error",
            "Gram matrices MB, computed", "peak extra MB",
        ],
        rows,
        [
            Verdict("2 ranks / one process", seconds[1] / seconds[0], 1, is_aim=True),
        ],
        [
            "Masks: Wanda by rows, 50 %. The error is that of the outputs on the calibration data, "
            "the mean over the matrices.",
        ],
    )  # fmt: skip


def measure(width: int, hidden: int, num_tokens: int, threads: int, dtype: str) -> dict[str, Any]:
    """On every rank: seconds and bytes of each phase."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    block = Block(width, hidden).eval()
    mixing = torch.randn(width, width) / width**0.5
    inputs = F.rms_norm(torch.randn(num_tokens, width) @ mixing, (width,))
    rank, size = dist.get_rank(), dist.get_world_size()
    if size > 1:
        fully_shard(block)
    pairs = prune.select(block)
    grams = GramMatrices(pairs)
    mine = inputs.chunk(size)[rank]

    def collect() -> None:
        with torch.no_grad(), grams.collecting():
            for batch in mine.split(1024):
                block(batch)

    found: dict[str, Any] = {"collect": measured(collect).seconds, "grams": grams.num_bytes() / 1e6}

    def choose() -> None:
        prune.global_unstructured(
            pairs, prune.L1Unstructured, grams.wanda(), amount=AMOUNT, scope="row"
        )

    def solve() -> float:
        report = prune.reconstruct(pairs, grams, dtype=getattr(torch, dtype))
        for entry in report.parameters:
            if not entry.error_after < entry.error_before:
                raise CheckFailed(f"{entry.name}: {entry}")
        return sum(entry.error_after for entry in report.parameters) / len(report.parameters)

    with prune.keep_pruned_values():
        found["mask"] = measured(choose).seconds
        solved = measured(solve)
    found |= {
        "solve": solved.seconds,
        "error": solved.result,
        "peak": solved.peak_extra_bytes / 1e6,
    }
    return found
