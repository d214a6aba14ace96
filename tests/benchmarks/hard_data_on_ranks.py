"""Hard data on several ranks: the collectives, bytes and seconds of a call."""

from __future__ import annotations

import adversarial as fills
import data
import torch
import torch.distributed as dist
from adversarial import Fill
from gloo_ranks import on_gloo_ranks
from measuring import Bound, Cell, Options, Table, Verdict
from sharded_models import AMOUNT, MAX_KIB, check_local_masks, local_like, placed, prune
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distprune

HARD: dict[str, Fill] = {
    "normal": fills.normal,
    "all equal": fills.all_equal,
    "256 values": fills.of_256_values,
    "half zeros": fills.half_zeros,
    "sorted": fills.ascending,
    "denormals": fills.denormals,
    "row scales": fills.row_scales,
    "tensor scales": fills.tensor_scales,
    "two values, 1 ulp apart": fills.one_ulp_apart,
    "a rank that owns nothing": fills.normal,
    "half pruned before": fills.normal,
}
AMOUNTS = (0.1, 0.5, 0.9)


def hard_data(options: Options) -> Table:
    """Collectives and bytes where the data leads the sample astray, or ties abound."""
    num_elements = 300_000 if options.quick else 10_000_000
    rows: list[list[Cell]] = []
    for num_ranks in (2,) if options.quick else (2, 4):
        for dtype in ("float32", "bfloat16"):
            found = on_gloo_ranks(measure_hard_data, num_ranks, num_elements, dtype)
            for each, *others in zip(*found, strict=True):
                name, collectives, kib, seconds = each
                slowest_seconds = max(seconds, *(other[-1] for other in others))
                rows.append([name, num_ranks, dtype, collectives, kib, slowest_seconds])
    return Table(
        f"Hard data on FSDP2, {num_elements:,} elements; worst of amounts {AMOUNTS}",
        ["data", "ranks", "dtype", "collectives", "KiB per rank", "seconds"],
        rows,
        [
            Verdict(Bound("collectives, hard data", 32), max(row[3] for row in rows)),
            Verdict(Bound("KiB sent per rank, hard data", MAX_KIB), max(row[4] for row in rows)),
        ],
        ["Everything is measured; every bit of every rank's masks was compared with the oracle."],
    )


def measure_hard_data(num_elements: int, dtype: str) -> list[tuple[str, int, float, float]]:
    """On every rank: per kind of data, the most collectives, KiB and seconds of all amounts."""
    prune_hard_data("normal", num_elements, getattr(torch, dtype), AMOUNT)  # to warm up
    found = []
    for name in HARD:
        each = [
            prune_hard_data(name, num_elements, getattr(torch, dtype), amount) for amount in AMOUNTS
        ]
        found.append((name, *map(max, zip(*each, strict=True))))
    return found


def prune_hard_data(
    name: str, num_elements: int, dtype: torch.dtype, amount: float
) -> tuple[int, float, float]:
    """Collectives, KiB and seconds of one call.

    Raises:
        CheckFailed: a mask or the report is wrong.
    """
    weights = hard_weights(name, num_elements, dtype)
    earlier = None
    if name == "half pruned before":
        generator = torch.Generator().manual_seed(1)
        earlier = [torch.rand(w.shape, generator=generator) < 0.5 for w in weights]
    expected = data.oracle(weights, amount, earlier)
    masks = data.expected_masks(weights, expected, earlier)
    keeps = [torch.from_numpy(keep).view(w.shape) for keep, w in zip(masks, weights, strict=True)]
    model = data.model_of(weights)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    keeps = [local_like(keep, p) for keep, (p, _) in zip(keeps, placed(model), strict=True)]
    for layer, mask in zip(model, earlier or (), strict=False):
        distprune.custom_from_mask(layer, "weight", mask)
    dist.barrier()
    report = prune(data.pairs(model), amount)
    data.check_report(report, expected)
    check_local_masks(model, keeps)
    return report.num_collectives, report.bytes_sent / 1024, report.seconds


def hard_weights(name: str, num_elements: int, dtype: torch.dtype) -> list[Tensor]:
    """Whole weights: two thirds of the elements in one, the rest in eight."""
    sizes = [num_elements * 2 // 3] + [num_elements // 24] * 8
    # FSDP2 gives the last rank no row of these.
    num_rows = max(1, dist.get_world_size() - 1) if name == "a rank that owns nothing" else 1000
    generator = torch.Generator().manual_seed(0)
    weights, before = [], 0
    for size in sizes:
        weights.append(torch.empty(num_rows, size // num_rows, dtype=dtype))
        HARD[name](weights[-1], before / num_elements, generator)
        before += size
    return weights
