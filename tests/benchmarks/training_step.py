"""What masks cost in training: a step of a pruned model beside a step of the dense one.

Both models live in the same processes and step in turn. The bounds are for FSDP2; the other
ways to run a model stand beside it.

- time: forward, backward and AdamW; the median over the rounds of pruned / dense.
- bytes kept for backward: the storages of all tensors there are after forward, and were not
  before. Exact, with all that autograd saves and all weights that FSDP has gathered. On a CPU.
- traffic: every collective of a step, with its bytes, as the dispatcher sees them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.nn.utils.prune as torch_prune
from measuring import CheckFailed, Options, Table, Verdict, interleaved, measured, synchronize
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import distprune
from helpers.collective_traffic import Traffic
from helpers.on_ranks import on_ranks

AMOUNT = 0.5
WARM_UP = 2
LARGEST_RATIO = 1.05
# How a model is run, and whether the bounds are for it.
WAYS = {
    "FSDP2": True,
    "FSDP2, fused AdamW": False,
    "FSDP2, bf16 policy, fused AdamW": False,
    "FSDP1": False,
    "one process": False,
}
# A decoder and its batch: so many sequences of a length on each rank.
LARGE = {
    "width": 512, "blocks": 4, "head": 64, "vocabulary": 4096, "sequences": 4, "length": 256
}  # fmt: skip
SMALL = {"width": 64, "blocks": 2, "head": 16, "vocabulary": 256, "sequences": 1, "length": 32}


class Block(nn.Module):
    """Causal attention and an MLP, each after a norm and with a residual connection."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        made = (layer(y) for layer in (self.q, self.k, self.v))
        q, k, v = (each.unflatten(-1, (-1, self.head)).transpose(1, 2) for each in made)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """[batch, length] tokens -> the loss of each token by those before it."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes["vocabulary"], sizes["width"])
        blocks = (Block(sizes["width"], sizes["head"]) for _ in range(sizes["blocks"]))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(sizes["width"])
        self.lm_head = nn.Linear(sizes["width"], sizes["vocabulary"], bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.lm_head(self.norm(self.blocks(self.embed(tokens[:, :-1]))))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def build(sizes: dict[str, int], way: str, device: str) -> nn.Module:
    """A decoder, run one of the :data:`WAYS` over all ranks."""
    torch.manual_seed(0)
    model = Decoder(sizes).to(device)
    if way == "one process":
        return model
    if way == "FSDP1":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy([Block]),
            device_id=torch.device(device),
            use_orig_params=True,
        )
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=half if "bf16" in way else MixedPrecisionPolicy())
    return model


def prune_by_torch(model: nn.Module, pruned: nn.Module) -> None:
    """Put the masks of another model on this one, with torch.nn.utils.prune."""
    for name, module in pruned.named_modules():
        if hasattr(module, "weight_mask"):
            torch_prune.custom_from_mask(model.get_submodule(name), "weight", module.weight_mask)


class Contestant:
    """A model in training, always on the same batch."""

    def __init__(self, model: nn.Module, tokens: Tensor, is_fused: bool) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=is_fused)
        self.tokens = tokens

    def finish(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> float:
        """Seconds."""
        dist.barrier()
        synchronize(self.tokens.device)
        started = time.perf_counter()
        self.finish(self.model(self.tokens))
        synchronize(self.tokens.device)
        return time.perf_counter() - started

    def kept_bytes(self) -> int:
        before = live_tensors()  # as long as these are held, no address is used twice
        old = {address for address, _ in storages(before)}
        saved = []  # autograd holds these where Python's collector cannot see them
        with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda t: t):
            loss = self.model(self.tokens)
        new = {address: size for address, size in storages(live_tensors()) if address not in old}
        self.finish(loss)
        return sum(new.values())

    def traffic(self) -> list[tuple[str, int]]:
        with Traffic() as traffic:
            self.finish(self.model(self.tokens))
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


def measure(way: str, is_small: bool, rounds: int, kind: str) -> dict[str, Any]:
    """On every rank: check and measure one of the :data:`WAYS`."""
    sizes = SMALL if is_small else LARGE
    shape, generator = (sizes["sequences"], sizes["length"] + 1), torch.Generator().manual_seed(0)
    tokens = torch.randint(sizes["vocabulary"], shape, generator=generator).to(kind)
    dense, pruned = (build(sizes, way, kind) for _ in range(2))
    targets = distprune.select(pruned, everything=True)
    distprune.global_unstructured(targets, distprune.L1Unstructured, amount=AMOUNT)
    models = {"dense": dense, "pruned": pruned}
    if way == "one process":
        models["torch"] = build(sizes, way, kind)
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
        raise CheckFailed(f"{way}: a pruned step sends other than a dense one: {found}")
    for name, times in interleaved(steps, rounds).items():
        found[name]["steps"] = times
        found[name]["peak"] = measured(steps[name], device=kind).peak_extra_bytes
    return found


def ratio(found: dict[str, Any], name: str) -> float:
    pairs = zip(found[name]["steps"], found["dense"]["steps"], strict=True)
    return statistics.median(step / dense for step, dense in pairs)


def tables(options: Options) -> Iterator[Table]:
    """A training step, in each of the :data:`WAYS`."""
    sizes = SMALL if options.quick else LARGE
    rounds = options.num_rounds(11)
    rows, verdicts = [], []
    for way, is_bound in WAYS.items():
        size = 1 if way == "one process" or options.device != "cpu" else 2
        own = rounds if is_bound else max(1, rounds // 3)
        found = on_ranks(
            measure, size, way, options.quick, own, options.device, device=options.device
        )[0]
        for name, each in found.items():
            row = [f"{way}: {name}", statistics.median(each["steps"])]
            row += [None if name == "dense" else ratio(found, name)]
            row += [each["kept"] / 1e6, each["peak"] / 1e6, len(each["traffic"])]
            rows.append([*row, bytes_sent(each) / 1e6])
        if is_bound:
            verdicts += verdicts_on(way, found)
    with torch.device("meta"):
        num_elements = sum(each.numel() for each in Decoder(sizes).parameters())
    yield Table(
        f"A training step, {num_elements / 1e6:.1f}M parameters, pruned to {AMOUNT:.0%}",
        [
            *["", "s per step", "/ dense's"],
            *["MB kept for backward", "peak MB of a step", "collectives", "MB sent"],
        ],
        rows,
        verdicts,
        [
            f"{sizes}; AdamW, fp32; 2 gloo ranks with 1 thread each, 1 rank on a device",
            f"medians of {rounds} rounds (a third of them where no bound is), in turn",
            "torch: torch.nn.utils.prune, with the same masks",
            "AdamW, if not fused, takes MKL's square roots, which take several times as long of 0,",
            "  as all second moments of pruned elements are; an accelerator has no such case",
            "a mask takes 1 byte per element of a shard under FSDP, else as much as its parameter",
            "peak: rise of the memory over a step that begins without free pages",
        ],
    )


def bytes_sent(found: dict[str, Any]) -> int:
    return sum(size for _, size in found["traffic"])


def verdicts_on(way: str, found: dict[str, Any]) -> list[Verdict]:
    dense, pruned = found["dense"], found["pruned"]
    kept, sent = pruned["kept"] - dense["kept"], bytes_sent(pruned) - bytes_sent(dense)
    return [
        Verdict(
            f"{way}: seconds of a pruned step / a dense one", ratio(found, "pruned"), LARGEST_RATIO
        ),
        Verdict(f"{way}: bytes that a pruned step keeps for backward, less a dense one's", kept, 0),
        Verdict(f"{way}: bytes that a pruned step sends, less a dense one's", sent, 0),
    ]
