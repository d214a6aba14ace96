"""What the cost model says of models, ranks and GPUs that are not here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cost_constants import Model, hops
from cost_points import scratch_keys
from measuring import Cell, Table


@dataclass(frozen=True)
class Llama:
    """Sizes of a language model; weights only."""

    name: str
    num_layers: int
    width: int
    key_width: int
    inner: int
    vocabulary: int

    def shapes(self) -> list[tuple[int, ...]]:
        """Of all parameters."""
        w, k, i = self.width, self.key_width, self.inner
        layer = [(w, w), (k, w), (k, w), (w, w), (i, w), (i, w), (w, i), (w,), (w,)]
        return [(self.vocabulary, w), *layer * self.num_layers, (w,), (self.vocabulary, w)]


MODELS = (
    Llama("8B", 32, 4096, 1024, 14336, 128_256),
    Llama("70B", 80, 8192, 1024, 28672, 128_256),
    Llama("405B", 126, 16384, 1024, 53248, 128_256),
    Llama("1T (assumed shapes)", 165, 22528, 1024, 73728, 128_256),
)
NUM_RANKS = (8, 64, 512, 1024, 4096)


@dataclass(frozen=True)
class Gpu:
    """Assumptions about an H100 and NCCL: nothing of this was measured.

    Attributes:
        traffic: bytes moved per element and dtype: by torch's operations, by Triton's kernels.
        bandwidth: bytes per second that both reach.
        launch: seconds per launch; torch's operations are launched for every chunk, the kernels
            for all.
        latencies: of a small all-reduce, seconds by number of ranks.
    """

    traffic: Mapping[str, tuple[float, float]]
    bandwidth: float = 2.8e12
    launch: float = 5e-6
    launches_per_chunk: int = 14
    launches_of_kernels: int = 4
    chunk: int = 1 << 24
    latencies: tuple[tuple[int, float], ...] = ((8, 30e-6), (64, 0.1e-3), (1024, 0.25e-3))
    link: float = 25e9

    def latency(self, num_ranks: int) -> float:
        """Linear in the logarithm of the ranks, and on along the last piece."""
        at = [math.log2(ranks) for ranks, _ in self.latencies]
        seconds = [latency for _, latency in self.latencies]
        slope = (seconds[-1] - seconds[-2]) / (at[-1] - at[-2])
        beyond = max(0.0, math.log2(num_ranks) - at[-1]) * slope
        return float(np.interp(math.log2(num_ranks), at, seconds)) + beyond

    def of_call(
        self,
        num_ranks: int,
        local_sizes: Sequence[int],
        dtype: str,
        model: Model,
        *,
        by_kernels: bool,
    ) -> float:
        """Seconds of a call; ``local_sizes``: elements of every parameter on one rank."""
        moved = sum(local_sizes) * self.traffic[dtype][by_kernels] / self.bandwidth
        num_chunks = sum(-(-size // self.chunk) for size in local_sizes)
        launches = num_chunks * self.launches_per_chunk
        launching = (self.launches_of_kernels if by_kernels else launches) * self.launch
        host = model.of_host(len(local_sizes))
        sending = model.num_bytes(len(local_sizes)) / self.link
        return host + moved + launching + model.collectives * self.latency(num_ranks) + sending


def predictions(model: Model, traffic: Mapping[str, tuple[float, float]]) -> Table:
    """For models and ranks that are not here."""
    gpu = Gpu(traffic)
    rows: list[list[Cell]] = []
    for llama, num_ranks in itertools.product(MODELS, NUM_RANKS):
        shapes = llama.shapes()
        total = sum(map(math.prod, shapes))
        # FSDP2 cuts rows; the first rank has the most.
        local_sizes = [-(-shape[0] // num_ranks) * math.prod(shape[1:]) for shape in shapes]
        num_local = sum(local_sizes)
        sampled, collected = scratch_keys(total)
        row: list[Cell] = [
            llama.name, num_ranks, f"{total / 1e9:.1f}e9", len(shapes), f"{num_local / 1e6:,.1f}e6",
        ]  # fmt: skip
        for dtype in ("bfloat16", "float32"):
            row.append(model.of_call(num_ranks, num_local, len(shapes), dtype))
        row.append(model.collectives * hops(num_ranks) * model.hop)
        for dtype, by_kernels in itertools.product(("bfloat16", "float32"), (False, True)):
            row.append(gpu.of_call(num_ranks, local_sizes, dtype, model, by_kernels=by_kernels))
        row.append(model.of_host(len(shapes)))
        row += [
            num_local / 1e6,
            (4 * sampled + 12 * collected) / num_ranks / 1e6,
            model.num_bytes(len(shapes)) / 1024,
            "computed",
        ]
        rows.append(row)
    return Table(
        "Predictions: one call, FSDP2, amount=0.5; nothing in this table was measured",
        [
            "model", "ranks", "elements", "parameters", "on the busiest rank", "CPU bf16 s",
            "CPU fp32 s", "of it latency", "GPU bf16 s, torch", "GPU bf16 s, Triton",
            "GPU fp32 s, torch", "GPU fp32 s, Triton", "of it on the host",
            "masks MB", "sample and candidates MB", "KiB sent", "how",
        ],
        rows,
        [],
        [
            "CPU: constants fitted above; every rank has a core, memory bandwidth and a link as "
            "here, and gloo's all-reduce goes around a ring, which is what many ranks wait for.",
            f"GPU, assumed: {gpu.bandwidth / 1e12:g} TB/s, for both forms; bytes moved per element "
            f"as counted above; launches of {gpu.launch * 1e6:g} us: {gpu.launches_per_chunk} per "
            f"chunk of 2^{gpu.chunk.bit_length() - 1} elements by torch, "
            f"{gpu.launches_of_kernels} in all by Triton; NCCL all-reduces of 30 us, 0.1 ms and "
            "0.25 ms at 8, 64 and 1024 ranks, a link of "
            f"{gpu.link / 1e9:g} GB/s; the host's part, fixed and per parameter, as fitted above.",
            "Memory per rank, computed: a mask of one byte per element; 4 bytes per sampled key, "
            "and 12 per candidate (its key twice, and where it is), spread evenly. Bytes sent do "
            "not depend on the number of ranks.",
        ],
    )  # fmt: skip
