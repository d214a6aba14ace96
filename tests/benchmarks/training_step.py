"""What masks cost in training: a step of a pruned model beside a step of the dense one.

Both models live in the same processes and step in turn. The bounds are for FSDP2; the other
ways to run a model stand beside it.

- time: forward, backward and AdamW; the median over the rounds of pruned / dense.
- bytes kept for backward: the storages of all tensors there are after forward, and were not
  before. Exact, with all that autograd saves and all weights that FSDP has gathered.
- traffic: every collective of a step, with its bytes, as the dispatcher sees them.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.utils.prune as torch_prune
from decoder import QUICK, WAYS, Decoder, Sizes, build, loss_of, wrap
from measuring import Bound, CheckFailed, Options, Table, Verdict, interleaved, measured
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

import distprune

sys.path.append(str(Path(__file__).resolve().parents[1]))
from helpers.collective_traffic import Traffic

AMOUNT = 0.5
NUM_RANKS = 2
WARM_UP = 2
LARGEST_RATIO = 1.05


def prune(model: nn.Module) -> None:
    targets = distprune.select(model, everything=True)
    distprune.global_unstructured(targets, distprune.L1Unstructured, amount=AMOUNT)


def prune_by_torch(model: nn.Module, pruned: nn.Module) -> None:
    """Put the masks of another model on this one, with torch.nn.utils.prune."""
    for name, module in pruned.named_modules():
        if hasattr(module, "weight_mask"):
            torch_prune.custom_from_mask(model.get_submodule(name), "weight", module.weight_mask)


@dataclass(frozen=True)
class Step:
    """Wall seconds, and seconds of the CPU of this process."""

    seconds: float
    cpu_seconds: float


class Contestant:
    """A model in training, always on the same batch."""

    def __init__(self, model: nn.Module, tokens: Tensor, is_fused: bool) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=is_fused)
        self.tokens = tokens

    def loss(self) -> Tensor:
        return loss_of(self.model, self.tokens)

    def finish(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> Step:
        if dist.is_initialized():
            dist.barrier()
        started = time.perf_counter(), time.process_time()
        self.finish(self.loss())
        return Step(time.perf_counter() - started[0], time.process_time() - started[1])

    def kept_bytes(self) -> int:
        before = live_tensors()  # as long as these are held, no address is used twice
        old = {address for address, _ in storages(before)}
        saved = []  # autograd holds these where Python's collector cannot see them
        with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda t: t):
            loss = self.loss()
        new = {address: size for address, size in storages(live_tensors()) if address not in old}
        self.finish(loss)
        return sum(new.values())

    def traffic(self) -> list[tuple[str, int]]:
        with Traffic() as traffic:
            self.finish(self.loss())
        return traffic.calls


def live_tensors() -> list[Tensor]:
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor)]


def storages(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """(address, bytes) of what the tensors hold. A DTensor's part is a tensor of its own."""
    for each in tensors:
        if not isinstance(each, DTensor) and each.device.type == "cpu":
            storage = each.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()


def on_rank(rank: int, store: str, ways: dict[str, int], sizes: Sizes, out: str) -> None:
    """Check and measure some :data:`WAYS`; rank 0 writes what it found to ``out``.

    Args:
        ways: the number of rounds of each.
    """
    torch.set_num_threads(1)
    size = num_ranks(ways)
    if size > 1:
        files = dist.FileStore(store, size)
        dist.init_process_group("gloo", rank=rank, world_size=size, store=files)
    found = {way: measure_way(way, sizes, rounds) for way, rounds in ways.items()}
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    if size > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an ordinary exit


def measure_way(way: str, sizes: Sizes, rounds: int) -> dict[str, Any]:
    shape = (sizes.sequences, sizes.length + 1)
    tokens = torch.randint(sizes.vocabulary, shape, generator=torch.Generator().manual_seed(0))
    dense, pruned = (wrap(build(sizes), way) for _ in range(2))
    prune(pruned)
    models = {"dense": dense, "pruned": pruned}
    if way == "one process":
        models["torch"] = build(sizes)
        prune_by_torch(models["torch"], pruned)
    contestants = {
        name: Contestant(model, tokens, is_fused="fused" in way) for name, model in models.items()
    }
    steps = {name: each.step for name, each in contestants.items()}
    interleaved(steps, WARM_UP)
    found = {
        name: {"kept": each.kept_bytes(), "traffic": each.traffic()}
        for name, each in contestants.items()
    }
    if found["pruned"]["traffic"] != found["dense"]["traffic"]:
        raise CheckFailed(
            f"{way}: the pruned model sends {found['pruned']['traffic']}, the dense one "
            f"{found['dense']['traffic']}"
        )
    for name, times in interleaved(steps, rounds).items():
        found[name]["steps"] = [vars(each) for each in times]
        found[name]["peak"] = measured(steps[name]).peak_extra_bytes
    return found


def num_ranks(ways: Iterable[str]) -> int:
    return 1 if "one process" in ways else NUM_RANKS


def measure(ways: dict[str, int], sizes: Sizes) -> dict[str, Any]:
    """What :func:`on_rank` finds, in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out, store = Path(folder, "found"), Path(folder, "store")
        mp.spawn(on_rank, args=(str(store), ways, sizes, str(out)), nprocs=num_ranks(ways))
        return json.loads(out.read_text())


def ratio(found: dict[str, Any], name: str, key: str) -> float:
    pairs = zip(found[name]["steps"], found["dense"]["steps"], strict=True)
    return statistics.median(step[key] / dense[key] for step, dense in pairs)


def tables(options: Options) -> Iterator[Table]:
    yield steps(options)


def steps(options: Options) -> Table:
    """A training step, in each of the :data:`WAYS`."""
    sizes = QUICK if options.quick else Sizes()
    rounds = options.num_rounds(11)
    fewer = max(1, rounds // 3)
    ways = {way: rounds if is_bound else fewer for way, is_bound in WAYS.items()}
    alone = {"one process": ways.pop("one process")}
    with torch.device("meta"):
        num_elements = sum(each.numel() for each in Decoder(sizes).parameters())
    rows, verdicts = [], []
    for way, found in {**measure(ways, sizes), **measure(alone, sizes)}.items():
        for name, each in found.items():
            row = [f"{way}: {name}", statistics.median(step["seconds"] for step in each["steps"])]
            for key in vars(Step(0, 0)):
                row.append(None if name == "dense" else ratio(found, name, key))
            row += [each["kept"] / 1e6, each["peak"] / 1e6, len(each["traffic"])]
            rows.append([*row, bytes_sent(each) / 1e6])
        if WAYS[way]:
            verdicts += verdicts_on(way, found)
    return Table(
        f"A training step, {num_elements / 1e6:.1f}M parameters, pruned to {AMOUNT:.0%}",
        [
            *["", "s per step", "/ dense's", "CPU s / dense's"],
            *["MB kept for backward", "peak MB of a step", "collectives", "MB sent"],
        ],
        rows,
        verdicts,
        [
            f"{sizes}; AdamW, fp32; {NUM_RANKS} gloo ranks with 1 thread each",
            f"medians of {rounds} rounds ({fewer} where no bound is), in turn",
            "torch: torch.nn.utils.prune, with the same masks",
            "AdamW, if not fused, takes MKL's square roots, which take several times as long of 0,",
            "  as all second moments of pruned elements are; an accelerator has no such case",
            "a mask takes 1 byte per element of a shard under FSDP, else as much as its parameter",
            "peak: rise of the resident set over a step that begins without free pages",
        ],
    )


def bytes_sent(found: dict[str, Any]) -> int:
    return sum(size for _, size in found["traffic"])


def verdicts_on(way: str, found: dict[str, Any]) -> list[Verdict]:
    dense, pruned = found["dense"], found["pruned"]
    return [
        Verdict(
            Bound(f"{way}: seconds of a pruned step / a dense one", LARGEST_RATIO),
            ratio(found, "pruned", "seconds"),
        ),
        Verdict(
            Bound(f"{way}: bytes that a pruned step keeps for backward, less a dense one's", 0),
            pruned["kept"] - dense["kept"],
        ),
        Verdict(
            Bound(f"{way}: bytes that a pruned step sends, less a dense one's", 0),
            bytes_sent(pruned) - bytes_sent(dense),
        ),
    ]
