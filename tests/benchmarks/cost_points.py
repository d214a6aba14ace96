"""The calls that the cost model is fitted to, and the bandwidths of this machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import data
import torch
import torch.distributed as dist
from gloo_ranks import on_gloo_ranks
from measuring import CheckFailed, Options
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
