"""Least squares for one decoder block of a 1B model, beside SparseGPT: time and memory.

    python tests/benchmarks/bench_reconstruction.py [--ranks 2] [--tokens 16384]

The block has 2048 inputs and 8192 hidden features. Three things are timed in one run: the forwards
alone, the forwards that collect Gram matrices, and the update of all weights, with 50 % pruned by
rows. Beside them stands a plain SparseGPT (tests/helpers), on the same Gram matrices, which
chooses its own mask.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import distprune as prune
from distprune._common.memory import peak_rss_bytes
from distprune.statistics import GramMatrices
from distprune.testing import run_ranks
from helpers.sparse_gpt import sparse_gpt

HIDDEN, INNER, KEYS = 2048, 8192, 512


class Block(nn.Module):
    """The matrices of a decoder block, without what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(HIDDEN, KEYS, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.q(x) + (self.k(x) * self.v(x)).repeat(1, HIDDEN // KEYS)
        x = x + self.o(mixed)
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def measure(num_tokens: int, with_peer: bool) -> dict[str, Any]:
    """Seconds and bytes on this rank."""
    torch.manual_seed(0)
    block = Block().eval()
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks > 1:
        fully_shard(block)
    torch.manual_seed(dist.get_rank() if num_ranks > 1 else 0)
    mixing = torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5
    batches = [torch.randn(1024, HIDDEN) @ mixing for _ in range(num_tokens // num_ranks // 1024)]
    parameters = prune.select(block)
    found: dict[str, Any] = {"ranks": num_ranks, "tokens": num_tokens}

    def forwards() -> None:
        with torch.no_grad():
            for batch in batches:
                block(batch)

    found["forward_seconds"] = _seconds(forwards)
    grams = GramMatrices(parameters)
    before = peak_rss_bytes()
    with grams.collecting():
        found["forward_and_gram_seconds"] = _seconds(forwards)
    found["gram_bytes_added"] = peak_rss_bytes() - before
    found["gram_bytes_computed"] = grams.num_bytes()
    whole = {pair: grams.matrix(*pair) for pair in parameters} if with_peer else {}
    prune.global_unstructured(
        parameters, prune.L1Unstructured, grams.wanda(), amount=0.5, scope="row"
    )
    before = peak_rss_bytes()
    found["reconstruct_seconds"] = _seconds(lambda: prune.reconstruct(parameters, grams))
    found["reconstruct_bytes_added"] = peak_rss_bytes() - before
    if with_peer:
        began = time.perf_counter()
        for pair in parameters:
            weight = pair[0]._parameters["weight_orig"].detach()
            sparse_gpt(weight, whole[pair], 0.5)
        found["sparse_gpt_seconds"] = time.perf_counter() - began
    return found


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16384)
    parsed = parser.parse_args()
    if parsed.ranks == 1:
        results = [measure(parsed.tokens, with_peer=True)]
    else:
        results = list(run_ranks(measure, parsed.ranks, parsed.tokens, False))
    print(json.dumps(results[0], indent=1))


if __name__ == "__main__":
    main()
