"""What a call costs on ranks, devices and models that are not here: a model, and predictions.

    seconds = fixed + per_parameter * parameters + per_element * local elements
              + collectives * latency(ranks) + bytes / link

The constants are fitted to calls that are measured in the same run, and every one of these calls is
shown beside what the model says of it. Sizes of scratch memory and of messages come from what the
library does, and are computed where nothing was run.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import data
import numpy as np
import torch
import torch.distributed as dist
from gloo_ranks import on_gloo_ranks
from measuring import Bound, Cell, CheckFailed, Options, Table, Verdict
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

import distprune
from distprune.call.report import PruningReport
from distprune.selection import bracket

NUM_CORES = os.cpu_count() or 1  # ranks beyond these take turns
AMOUNT = 0.5
WIDTH = 64
DTYPES = ("float32", "bfloat16")


def tables(options: Options) -> Iterator[Table]:
    points = measure_points(options)
    model = fit(points)
    yield constants(model)
    yield residuals(model, points)
    yield predictions(model)


@dataclass(frozen=True)
class Point:
    """One measured call."""

    num_ranks: int
    num_elements: int
    num_parameters: int
    dtype: str
    seconds: float
    num_collectives: int
    num_bytes: int

    @property
    def num_turns(self) -> float:
        """How many ranks share a core."""
        return max(1.0, self.num_ranks / NUM_CORES)


@dataclass(frozen=True)
class Measured:
    """What the constants are fitted to.

    Attributes:
        points: calls.
        bandwidth: bytes per second that one thread reads.
        link: bytes per second of a large all-reduce between two ranks.
    """

    points: list[Point]
    bandwidth: float
    link: float


@dataclass(frozen=True)
class Model:
    """Constants; times are seconds.

    Attributes:
        per_element: by dtype, of one rank that has a core for itself.
        hop: from a rank to the next one; an all-reduce around a ring of R makes 2 (R - 1) of them.
        collectives: all-reduces of a call, most of all points.
        message: bytes per rank of a call: (fixed, per parameter, per all-reduce).
    """

    fixed: float
    per_parameter: float
    per_element: dict[str, float]
    hop: float
    link: float
    bandwidth: float
    collectives: int
    message: tuple[float, float, float]

    def of_host(self, num_parameters: int) -> float:
        return self.fixed + self.per_parameter * num_parameters

    def of_communication(self, num_ranks: int, num_collectives: int, num_bytes: float) -> float:
        if num_ranks == 1:
            return 0.0
        return num_collectives * hops(num_ranks) * self.hop + num_bytes / self.link

    def of_point(self, point: Point) -> float:
        """Seconds of a call that was measured, with the collectives that it had."""
        num_local = point.num_elements / point.num_ranks
        working = self.of_host(point.num_parameters) + self.per_element[point.dtype] * num_local
        return point.num_turns * working + self.of_communication(
            point.num_ranks, point.num_collectives, point.num_bytes
        )

    def of_call(self, num_ranks: int, num_local: float, num_parameters: int, dtype: str) -> float:
        """Seconds of a call on ranks that have a core each."""
        working = self.of_host(num_parameters) + self.per_element[dtype] * num_local
        num_bytes = self.num_bytes(num_parameters)
        return working + self.of_communication(num_ranks, self.collectives, num_bytes)

    def num_bytes(self, num_parameters: int) -> float:
        """Sent by every rank in one call."""
        fixed, per_parameter, per_collective = self.message
        return fixed + per_parameter * num_parameters + per_collective * self.collectives


def hops(num_ranks: int) -> int:
    """Of one all-reduce in gloo, which goes around a ring twice."""
    return 2 * (num_ranks - 1)


def measure_points(options: Options) -> Measured:
    if options.quick:
        sizes: list[tuple[int, int]] = [(200_000, 10), (200_000, 100), (1_000_000, 10)]
    else:
        sizes = [
            (2_000_000, 20), (2_000_000, 400), (10_000_000, 20), (10_000_000, 400),
            (40_000_000, 100), (100_000_000, 100),
        ]  # fmt: skip
    points, links = [], []
    for num_ranks in (1, 2) if options.quick else (1, 2, 4):
        rounds = options.num_rounds(4)
        found = on_gloo_ranks(measure_on_ranks, num_ranks, sizes, rounds, timeout=1200)
        for on_all in zip(*(each["calls"] for each in found), strict=True):
            first = on_all[0]
            # The slowest rank of the quickest round: what else the machine does is no constant.
            seconds = min(map(max, zip(*(c["seconds"] for c in on_all), strict=True)))
            points.append(
                Point(
                    num_ranks, first["elements"], first["parameters"], first["dtype"], seconds,
                    first["collectives"], first["bytes"],
                )
            )  # fmt: skip
        if num_ranks == 2:
            links = [each["link"] for each in found]
    return Measured(points, found[0]["bandwidth"], min(links))


def measure_on_ranks(sizes: Sequence[tuple[int, int]], rounds: int) -> dict[str, Any]:
    """On every rank."""
    calls = []
    for (num_elements, num_parameters), dtype in itertools.product(sizes, DTYPES):
        model = Weights(num_elements, num_parameters, getattr(torch, dtype))
        total = sum(parameter.numel() for parameter in model.parameters())
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        targets = data.pairs(model)
        with count_sampled() as sampled:
            prune(targets)
        check_sample(total, sampled)
        seconds = []
        for _ in range(rounds):
            dist.barrier()
            report = prune(targets)
            seconds.append(report.seconds)
        calls.append(
            {
                "elements": total, "parameters": num_parameters, "dtype": dtype,
                "seconds": seconds, "collectives": report.num_collectives,
                "bytes": report.bytes_sent,
            }
        )  # fmt: skip
    return {"calls": calls, "bandwidth": read_bandwidth(), "link": link_bandwidth()}


class Weights(nn.Module):
    """Equal matrices, which FSDP2 shards together."""

    def __init__(self, num_elements: int, num_parameters: int, dtype: torch.dtype) -> None:
        super().__init__()
        shape = (num_elements // num_parameters // WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(
            data.Weight(torch.empty(shape, dtype=dtype).normal_(generator=generator))
            for _ in range(num_parameters)
        )


def prune(targets: Sequence[tuple[nn.Module, str]]) -> PruningReport:
    """One call; the model is as before afterwards."""
    report = distprune.global_unstructured(targets, distprune.L1Unstructured, amount=AMOUNT)
    if report.num_pruned_now != round(AMOUNT * report.num_elements):
        raise CheckFailed(f"{report.num_pruned_now:,} of {report.num_elements:,} were pruned")
    for module, name in targets:
        getattr(module, name + "_mask").to_local().fill_(True)
        distprune.remove(module, name)
    return report


def read_bandwidth() -> float:
    """Bytes per second that one thread reads from memory."""
    values = torch.ones(50_000_000 // 4, dtype=torch.int32)
    return values.numel() * 4 / min(_seconds(lambda: values.max()) for _ in range(5))


def link_bandwidth() -> float:
    """Bytes per second of an all-reduce of 8 MB: those that are reduced, not those sent."""
    values = torch.ones(1_000_000, dtype=torch.int64)
    return values.numel() * 8 / min(_seconds(lambda: dist.all_reduce(values)) for _ in range(5))


def _seconds(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def scratch_keys(num_elements: int) -> tuple[float, float]:
    """Keys that one call samples, and keys between the brackets, over all ranks: as bracket.py.

    For an amount of 0.5, which takes the most, and a dtype of many keys.
    """
    if num_elements <= bracket.COLLECT_ALL:
        return 0.0, num_elements
    num_sampled = bracket.sample_size(num_elements)
    margin = bracket.margin_of(num_sampled / 2, num_sampled)
    return num_sampled, 2 * margin / num_sampled * num_elements


@contextlib.contextmanager
def count_sampled() -> Iterator[list[int]]:
    """How many keys this rank samples inside, time by time."""
    counts: list[int] = []
    original = bracket.sample

    def counted(*args: Any, **kwargs: Any) -> Any:
        drawn = original(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(drawn) if isinstance(leaf, Tensor)]
        counts.append(sum(tensor.numel() for tensor in tensors))
        return drawn

    with mock.patch.object(bracket, "sample", counted):
        yield counts


def check_sample(num_elements: int, sampled: Sequence[int]) -> None:
    """Whether :func:`scratch_keys` still says what bracket.py does.

    Raises:
        CheckFailed: shows both.
    """
    found = torch.tensor([sum(sampled)])
    dist.all_reduce(found)
    expected, _ = scratch_keys(num_elements)
    if abs(int(found) - expected) > 0.3 * expected + 10_000:
        raise CheckFailed(
            f"{int(found):,} keys of {num_elements:,} were sampled; scratch_keys expects "
            f"{expected:,.0f}. Bring it in line with bracket.py."
        )


def fit(measured: Measured) -> Model:
    """Least squares of relative errors, with constants that are not negative."""
    points = measured.points
    sending = [p for p in points if p.num_ranks > 1]
    message, *_ = np.linalg.lstsq(
        np.array([[1.0, p.num_parameters, p.num_collectives] for p in sending]),
        np.array([float(p.num_bytes) for p in sending]),
        rcond=None,
    )
    rows, targets = [], []
    for p in points:
        latency = 0 if p.num_ranks == 1 else p.num_collectives * hops(p.num_ranks)
        on_link = 0 if p.num_ranks == 1 else p.num_bytes / measured.link
        local = p.num_elements / p.num_ranks * p.num_turns
        by_dtype = [local if p.dtype == dtype else 0 for dtype in DTYPES]
        row = [p.num_turns, p.num_parameters * p.num_turns, *by_dtype, latency]
        rows.append(np.array(row) / p.seconds)
        targets.append((p.seconds - on_link) / p.seconds)
    found = non_negative_least_squares(np.array(rows), np.array(targets))
    return Model(
        fixed=found[0],
        per_parameter=found[1],
        per_element=dict(zip(DTYPES, found[2:4], strict=True)),
        hop=found[4],
        link=measured.link,
        bandwidth=measured.bandwidth,
        collectives=max(p.num_collectives for p in points),
        message=tuple(message.tolist()),
    )


def non_negative_least_squares(matrix: np.ndarray, target: np.ndarray) -> list[float]:
    """By trying every set of unknowns that are not zero: for a handful of unknowns."""
    num_unknowns = matrix.shape[1]
    # Columns differ by ten orders of magnitude.
    scale = np.abs(matrix).max(axis=0)
    best, best_error = np.zeros(num_unknowns), float(target @ target)
    for size in range(1, num_unknowns + 1):
        for chosen in map(list, itertools.combinations(range(num_unknowns), size)):
            part = matrix[:, chosen] / scale[chosen]
            solution, *_ = np.linalg.lstsq(part, target, rcond=None)
            error = float(((part @ solution - target) ** 2).sum())
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(num_unknowns), error
                best[chosen] = solution / scale[chosen]
    return best.tolist()


def constants(model: Model) -> Table:
    rows: list[list[Cell]] = [
        ["fixed, ms", model.fixed * 1e3, "fitted"],
        ["per parameter, us", model.per_parameter * 1e6, "fitted"],
    ]
    for dtype in DTYPES:
        seconds = model.per_element[dtype]
        rows.append([f"per element {dtype}, ns", seconds * 1e9, "fitted"])
        moved = seconds * model.bandwidth
        rows.append([f"the same in bytes read, {dtype}", moved, "fitted x measured bandwidth"])
    rows += [
        ["per hop of an all-reduce, us", model.hop * 1e6, "fitted"],
        ["memory bandwidth, one thread reads, GB/s", model.bandwidth / 1e9, "measured"],
        ["link of two ranks, all-reduce of 8 MB, GB/s", model.link / 1e9, "measured"],
        ["all-reduces of a call", model.collectives, "measured, the most of all calls"],
    ]
    for name, value in zip(
        ("fixed", "per parameter", "per all-reduce"), model.message, strict=True
    ):
        rows.append([f"bytes sent per rank, {name}", round(value, 1), "fitted"])
    return Table("Constants of the cost model", ["constant", "value", "how"], rows)


def residuals(model: Model, measured: Measured) -> Table:
    rows: list[list[Cell]] = []
    errors = []
    for p in measured.points:
        computed = model.of_point(p)
        errors.append(100 * (computed - p.seconds) / p.seconds)
        rows.append(
            [
                p.dtype, p.num_ranks, p.num_elements, p.num_parameters, p.num_collectives,
                p.num_bytes / 1024 if p.num_ranks > 1 else 0.0, p.seconds, computed,
                f"{errors[-1]:+.0f}",
            ]
        )  # fmt: skip
    typical = statistics.median(map(abs, errors))
    return Table(
        "The calls that the cost model was fitted to: FSDP2, gloo ranks of one thread each",
        [
            "dtype", "ranks", "elements", "parameters", "collectives", "KiB per rank",
            "measured s", "computed s", "error %",
        ],
        rows,
        [Verdict(Bound("median error of the cost model, %", 25, is_aim=True), typical)],
        [
            "Measured: the slowest rank of the quickest round. Computed: by the model, from the "
            "sizes, collectives and bytes of the same call.",
            f"More ranks than the {NUM_CORES} cores take turns: elements, parameters and the fixed "
            "part count ranks/cores times.",
        ],
    )  # fmt: skip


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
        bandwidth: bytes per second that kernels reach.
        traffic: bytes that torch's operations move per element, op by op.
        launch: seconds per launch, and launches per chunk.
        latencies: of a small all-reduce, seconds by number of ranks.
    """

    bandwidth: float = 2.8e12
    traffic: tuple[tuple[str, float], ...] = (("float32", 40.0), ("bfloat16", 26.0))
    launch: float = 5e-6
    launches_per_chunk: int = 14
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
        self, num_ranks: int, local_sizes: Sequence[int], dtype: str, model: Model
    ) -> float:
        """Seconds of a call; ``local_sizes``: elements of every parameter on one rank."""
        moved = sum(local_sizes) * dict(self.traffic)[dtype] / self.bandwidth
        num_chunks = sum(-(-size // self.chunk) for size in local_sizes)
        launching = num_chunks * self.launches_per_chunk * self.launch
        host = model.of_host(len(local_sizes))
        sending = model.num_bytes(len(local_sizes)) / self.link
        return host + moved + launching + model.collectives * self.latency(num_ranks) + sending


def predictions(model: Model) -> Table:
    """For models and ranks that are not here."""
    gpu = Gpu()
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
        for dtype in ("bfloat16", "float32"):
            row.append(gpu.of_call(num_ranks, local_sizes, dtype, model))
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
            "CPU fp32 s", "of it latency", "GPU bf16 s", "GPU fp32 s", "of it on the host",
            "masks MB", "sample and candidates MB", "KiB sent", "how",
        ],
        rows,
        [],
        [
            "CPU: constants fitted above; every rank has a core, memory bandwidth and a link as "
            "here, and gloo's all-reduce goes around a ring, which is what many ranks wait for.",
            f"GPU, assumed: {gpu.bandwidth / 1e12:g} TB/s, {gpu.traffic[0][1]:g} bytes moved per "
            f"element fp32 and {gpu.traffic[1][1]:g} bf16, {gpu.launches_per_chunk} launches of "
            f"{gpu.launch * 1e6:g} us per chunk of 2^{gpu.chunk.bit_length() - 1} elements, NCCL "
            "all-reduces of 30 us, 0.1 ms and 0.25 ms at 8, 64 and 1024 ranks, a link of "
            f"{gpu.link / 1e9:g} GB/s; the host's part, fixed and per parameter, as fitted above.",
            "Memory per rank, computed: a mask of one byte per element; 4 bytes per sampled key, "
            "and 12 per candidate (its key twice, and where it is), spread evenly. Bytes sent do "
            "not depend on the number of ranks.",
        ],
    )  # fmt: skip
