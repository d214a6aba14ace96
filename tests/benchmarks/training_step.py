"""What masks cost in training: a step of a pruned model beside a step of the dense one.

Both models live in the same processes and step in turn. The bounds are for FSDP2; the other
ways to run a model stand beside it.

- time: forward, backward and AdamW; the median over the rounds of pruned / dense.
- bytes kept for backward: the storages of all tensors there are after forward, and were not
  before. Exact, with all that autograd saves and all weights that FSDP has gathered.
- traffic: every collective of a step, with its bytes, as the dispatcher sees them.

First a pruned step is compared with one process: a dense model whose pruned weights are zero, and
whose gradients are multiplied by the masks.
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
import torch.nn.functional as F
import torch.nn.utils.prune as torch_prune
from measuring import Bound, CheckFailed, Options, Table, Verdict, interleaved, measured
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import distprune

sys.path.append(str(Path(__file__).resolve().parents[1]))
from helpers.collective_traffic import Traffic

AMOUNT = 0.5
NUM_RANKS = 2
WARM_UP = 2
LARGEST_RATIO = 1.05
# How a model is run, and whether the bounds are for it.
WAYS = {
    "FSDP2": True,
    "FSDP2, fused AdamW": False,
    "FSDP2, bf16 policy, fused AdamW": False,
    "FSDP1": False,
    "TP": False,
    "one process": False,
}


@dataclass(frozen=True)
class Sizes:
    """Of a decoder and its batch: ``sequences`` of ``length`` tokens on each rank."""

    width: int = 512
    num_blocks: int = 4
    head: int = 64
    vocabulary: int = 4096
    sequences: int = 4
    length: int = 256

    def __str__(self) -> str:
        blocks = f"{self.num_blocks} blocks of width {self.width}, vocabulary {self.vocabulary:,}"
        return f"{blocks}; {self.sequences} x {self.length} tokens per rank"


QUICK = Sizes(width=64, num_blocks=2, head=16, vocabulary=256, sequences=1, length=32)


class Block(nn.Module):
    """Causal attention and an MLP, each after a norm and with a residual connection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.head = sizes.head
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (self._heads(layer(y)) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head)).transpose(1, 2)


class Decoder(nn.Module):
    """[batch, length] tokens -> [batch, length, vocabulary] logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.num_blocks))
        self.norm = nn.LayerNorm(sizes.width)
        self.lm_head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def build(sizes: Sizes) -> Decoder:
    torch.manual_seed(0)
    return Decoder(sizes)


def wrap(model: Decoder, way: str) -> nn.Module:
    """Run a model one of the :data:`WAYS`, over all ranks."""
    if way == "one process":
        return model
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if way == "FSDP1":
        policy, device = ModuleWrapPolicy([Block]), torch.device("cpu")
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=device, use_orig_params=True
        )
    if way == "TP":
        for block in model.blocks:
            columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
            rows = dict.fromkeys(("o", "down"), RowwiseParallel())
            parallelize_module(block, mesh, {**columns, **rows})
        return model
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": half} if "bf16" in way else {}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def prune(model: nn.Module) -> None:
    targets = distprune.select(model)
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


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def check(model: nn.Module, way: str, sizes: Sizes, tokens: Tensor) -> None:
    """Compare loss and gradients of a pruned model with those of one process.

    Every rank has the same batch, and the mean of two equal gradients is exact: what is found
    must be equal bit for bit. TP alone sums in another order.
    """
    dense = build(sizes)
    keeps = expected_masks(dense)
    with torch.no_grad():
        for name, keep in keeps.items():
            dense.get_parameter(name).mul_(keep)
    if "bf16" in way:
        dense.bfloat16()
    expected, loss = loss_of(dense, tokens), loss_of(model, tokens)
    expected.backward()
    loss.backward()
    compare(way, "loss", loss.detach(), expected.detach())
    for name, gradient in whole_gradients(model):
        wanted = dense.get_parameter(name).grad.to(gradient.dtype)
        compare(way, f"gradient of {name}", gradient, wanted * keeps.get(name, True))
    model.zero_grad()


def compare(way: str, what: str, found: Tensor, expected: Tensor) -> None:
    same = torch.allclose if way == "TP" else torch.equal
    if not same(found, expected):
        off = (found - expected).abs().max()
        raise CheckFailed(f"{way}: {what} of the pruned model is off by {off:.3g}")


def expected_masks(dense: nn.Module) -> dict[str, Tensor]:
    """The masks of a global pruning by magnitude; among equal ones the first are pruned."""
    weights = {
        name: weight.detach().abs()
        for name, weight in dense.named_parameters()
        if name.endswith("weight") and "norm" not in name
    }
    scores = torch.cat([weight.flatten() for weight in weights.values()])
    order = scores.argsort(stable=True)
    keep = torch.ones(len(scores), dtype=torch.bool)
    keep[order[: round(AMOUNT * len(scores))]] = False
    parts = keep.split([weight.numel() for weight in weights.values()])
    return {
        name: part.view(weight.shape)
        for (name, weight), part in zip(weights.items(), parts, strict=True)
    }


def whole_gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """By the names that the parameters have in the dense model."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            found = [(name, each.grad.clone()) for name, each in model.named_parameters()]
    else:
        found = [(name, each.grad) for name, each in model.named_parameters()]
    for name, gradient in found:
        name = name.replace("_fsdp_wrapped_module.", "").removesuffix("_orig")
        yield (
            name,
            gradient.full_tensor() if isinstance(gradient, DTensor) else gradient,
        )


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
    check(pruned, way, sizes, tokens)
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
    yield forwards(options)


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
            "loss and gradients were those of one process before (bit for bit, but for TP)",
            "torch: torch.nn.utils.prune, with the same masks",
            "AdamW, if not fused, takes MKL's square roots, which take several times as long of 0,",
            "  as all second moments of pruned elements are; an accelerator has no such case",
            "a mask takes 1 byte per element of a shard under FSDP, else as much as its parameter",
            "peak: rise of the resident set over a step that begins without free pages",
        ],
    )


def forwards(options: Options) -> Table:
    """What the hook of a pruned plain module costs where there is next to nothing to compute."""
    names = ("dense", "pruned", "torch")
    layers = {name: nn.Linear(4, 4) for name in names}
    mask = torch.tensor([[True, False, True, False]] * 4)
    distprune.custom_from_mask(layers["pruned"], "weight", mask)
    torch_prune.custom_from_mask(layers["torch"], "weight", mask)
    x = torch.ones(1, 4)
    calls = {name: lambda layer=layer: _microseconds(layer, x) for name, layer in layers.items()}
    num_rounds = options.num_rounds(31)
    found = interleaved(calls, num_rounds)
    rows = []
    for name in names:
        over = [here - dense for here, dense in zip(found[name], found["dense"], strict=True)]
        rows.append([name, statistics.median(found[name]), statistics.median(over)])
    return Table(
        "A forward of Linear(4, 4) on one process",
        ["", "CPU us", "more than dense's"],
        rows,
        notes=[f"medians of {num_rounds} rounds of 1,000 calls each, in turn"],
    )


def _microseconds(layer: nn.Module, x: Tensor) -> float:
    started = time.thread_time()
    with torch.no_grad():
        for _ in range(1000):
            layer(x)
    return (time.thread_time() - started) * 1e3


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
