"""A training step under FSDP2: pruned beside dense, and what the all-gather extension costs.

A mask acts where a shard is all-gathered, by FSDP2's extension. A parameter with an extension does
not take FSDP2's fast path, which copies all parameters of a group with one launch where there is a
policy of mixed precision. So there is a third contestant: a dense model whose extension only
copies. What a pruned step takes more than that is the product.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from decoder import QUICK, Decoder, Sizes, build, loss_of, wrap
from device_clock import timed
from measuring import Table, interleaved
from on_ranks import run_on_ranks, whole
from stage import Stage, main, prune
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distprune.wrappers import fsdp2

LARGE = Sizes(2048, num_blocks=16, head=128, vocabulary=32_000, sequences=4, length=1024)
SMALL = Sizes(1024, num_blocks=4, head=128, vocabulary=8_000, sequences=2, length=512)
BF16 = "FSDP2, bf16 policy, fused AdamW"
FP32 = "FSDP2, fused AdamW"
NAMES = ("dense", "dense, with an extension that copies", "pruned")


def one_rank_bf16_policy(stage: Stage) -> None:
    measure(stage, 1, BF16, LARGE)


def one_rank_bf16_policy_compiled(stage: Stage) -> None:
    measure(stage, 1, BF16, LARGE, compiled=True)


def one_rank_float32(stage: Stage) -> None:
    measure(stage, 1, FP32, SMALL)


def two_ranks_over_gloo(stage: Stage) -> None:
    measure(stage, 2, BF16, SMALL)


def measure(stage: Stage, size: int, way: str, sizes: Sizes, *, compiled: bool = False) -> None:
    sizes = QUICK if stage.quick else sizes
    found = run_on_ranks(on_rank, size, stage.device, way, sizes, compiled, stage.quick)
    for rank, each in enumerate(found):
        where = f" on rank {rank}" if size > 1 else ""
        check(stage, each, where, compiled=compiled)
    runs = found[0]["runs"]
    rows: list[list[Any]] = []
    for name in NAMES:
        steps = [seconds for seconds, _ in runs[name]]
        ratios = [a / b for (a, _), (b, _) in zip(runs[name], runs["dense"], strict=True)]
        peak = max(extra for _, extra in runs[name]) / 1e6
        gather = found[0]["gathers"][name]
        rows.append([name, statistics.median(steps), statistics.median(ratios), peak, 1e3 * gather])
    columns = ["", "s per step", "/ dense's", "peak MB of a step", "ms to gather all"]
    title = f"{way}, {found[0]['elements'] / 1e6:.4g}M parameters, {size} rank(s)"
    title += ", compiled" if compiled else ""
    stage.table(Table(title, columns, rows, notes=[str(sizes), "medians, in turn"]))
    stage.figure("pruned step / dense step", rows[-1][2])


def check(stage: Stage, found: dict[str, Any], where: str, *, compiled: bool) -> None:
    ours, (theirs, again) = found["loss"], found["expected losses"]
    # Equal, but for what the dense model differs by from itself: kernels may add in any order.
    allowed = 4 * abs(theirs - again)
    if compiled:
        # Code that was compiled apart may round otherwise. Without the mask it would be far off.
        allowed = max(allowed, 0.1 * abs(theirs - found["loss without zeros"]))
    stage.check(
        f"loss is that of a dense model with zeros{where}",
        abs(ours - theirs) <= allowed,
        f"{ours:.9g}, off by {abs(ours - theirs):.3g}, of at most {allowed:.3g}",
    )
    wrong, examined = found["other weights"]
    stage.check(f"gathered weights are those of a dense model with zeros{where}", wrong == 0)
    stage.check(f"weights were compared{where}", examined > 0, f"{examined}")
    wrong = found["gradients of pruned elements"]
    stage.check(f"no pruned element has a gradient{where}", wrong == 0, f"{wrong} have one")
    wrong, examined = found["changed pruned elements"]
    stage.check(f"gathered weights have their zeros after steps{where}", wrong == 0, f"{wrong}")
    stage.check(f"gathered weights were examined{where}", examined > 0, f"{examined}")


def on_rank(
    device: torch.device, way: str, sizes: Sizes, compiled: bool, quick: bool
) -> dict[str, Any]:
    models = {name: make(way, sizes, device) for name in NAMES}
    copy_by_extension(models[NAMES[1]])
    pruned = models["pruned"]
    prune(pruned)
    if compiled:
        for model in models.values():
            for block in model.blocks:
                block.compile(backend="eager" if quick else "inductor")
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (sizes.sequences, sizes.length + 1)
    tokens = torch.randint(sizes.vocabulary, shape, generator=generator).to(device)
    found: dict[str, Any] = {"elements": sum(p.numel() for p in pruned.parameters())}
    found["loss without zeros"] = trained_loss(models["dense"], tokens)
    models["dense"].zero_grad()
    with zeros_of(pruned, models["dense"]):
        found["expected losses"] = [trained_loss(models["dense"], tokens) for _ in range(2)]
        found["other weights"] = other_weights(pruned, models["dense"])
    models["dense"].zero_grad()
    found["loss"] = trained_loss(pruned, tokens)
    found["gradients of pruned elements"] = sum(
        int((parameter.grad.to_local()[~mask.to_local()] != 0).sum())
        for _, parameter, mask in masked(pruned)
    )
    pruned.zero_grad()
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        for name, model in models.items()
    }

    def step(name: str) -> tuple[float, int]:
        def call() -> None:
            loss_of(models[name], tokens).backward()
            optimizers[name].step()
            optimizers[name].zero_grad()

        dist.barrier()
        run = timed(device, call)
        return run.seconds, run.peak_extra_bytes

    steps = {name: lambda name=name: step(name) for name in NAMES}
    # Over gloo everything goes through the host: there, what is checked counts.
    rounds = 2 if quick or dist.get_world_size() > 1 else 10
    interleaved(steps, min(3, rounds - 1))
    found["runs"] = interleaved(steps, rounds)
    gathers = {name: lambda name=name: gather(models[name], device) for name in NAMES}
    interleaved(gathers, 1)
    found["gathers"] = {
        name: statistics.median(each) for name, each in interleaved(gathers, rounds).items()
    }
    found["changed pruned elements"] = visible_zeros(pruned)
    return found


def make(way: str, sizes: Sizes, device: torch.device) -> nn.Module:
    with device:
        model: Decoder = build(sizes)
    return wrap(model, way, device.type)


def masked(model: nn.Module) -> Iterator[tuple[nn.Module, DTensor, DTensor]]:
    """Modules with a mask, the sharded weight, and the mask."""
    for module in model.modules():
        if "weight_mask" in module._buffers:
            yield module, module.weight, module.weight_mask


def trained_loss(model: nn.Module, tokens: Tensor) -> float:
    """The loss of a forward that has a backward: without, a compiler may fuse otherwise."""
    loss = loss_of(model, tokens)
    loss.backward()
    return loss.item()


@contextlib.contextmanager
def zeros_of(pruned: nn.Module, dense: nn.Module) -> Iterator[None]:
    """Give a dense model the zeros of the pruned one for a while."""
    names = {module: name for name, module in pruned.named_modules()}
    saved = []
    for module, _, mask in masked(pruned):
        weight = dense.get_submodule(names[module]).weight.detach().to_local()
        saved.append((weight, weight.clone()))
        weight.mul_(mask.to_local())
    yield
    for weight, values in saved:
        weight.copy_(values)


def other_weights(pruned: nn.Module, dense: nn.Module) -> tuple[int, int]:
    """How many gathered weights differ between two models in any element; and of how many."""
    wrong = examined = 0
    pairs = zip([*pruned.blocks, pruned], [*dense.blocks, dense], strict=True)
    for one, other in pairs:
        one.unshard()
        other.unshard()
        for module, twin in zip(one.modules(), other.modules(), strict=True):
            weight, expected = getattr(module, "weight", None), getattr(twin, "weight", None)
            if weight is None or isinstance(expected, DTensor):
                continue
            wrong += not torch.equal(weight, expected)
            examined += 1
        one.reshard()
        other.reshard()
    return wrong, examined


def gather(model: nn.Module, device: torch.device) -> float:
    """Seconds to gather all parameters, block by block."""

    def call() -> None:
        for module in [*model.blocks, model]:
            module.unshard()
            module.reshard()

    return timed(device, call).seconds


def visible_zeros(model: nn.Module) -> tuple[int, int]:
    """How many pruned elements of gathered weights are not zero; and how many weights there are."""
    wrong = examined = 0
    for block in [*model.blocks, model]:
        block.unshard()
        for module in [block, *block.modules()]:
            mask = module._buffers.get("weight_mask")
            weight = getattr(module, "weight", None)
            if mask is None or weight is None or isinstance(weight, DTensor):
                continue
            wrong += int((weight[~whole(mask)] != 0).sum())
            examined += 1
        block.reshard()
    return wrong, examined


class _Copies:
    """An all-gather extension that gathers a copy of the shard."""

    def __init__(self, record: Any) -> None:
        self.record = record

    def __call__(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        shard = self.record.sharded_param._local_tensor
        dtype = mp_policy.param_dtype or shard.dtype
        padded = shard.new_empty(self.record.padded_sharded_param_size, dtype=dtype)
        padded[: len(shard)].copy_(shard)
        padded[len(shard) :].zero_()
        return (padded,), None


def _gathered(
    outputs: tuple[Tensor, ...], metadata: Any, param_dtype: Any, *, out: Any = None
) -> Any:
    return None if out is not None else (outputs[0], ())


def copy_by_extension(model: nn.Module) -> None:
    """Give each weight of a dense model an extension that only copies."""
    modules = set(map(id, model.modules()))
    for (owner, _), managed in fsdp2.managed_parameters().items():
        record = managed.fsdp_param
        if owner in modules and record.sharded_param.ndim > 1:
            local = record.sharded_param._local_tensor
            local.fsdp_pre_all_gather = _Copies(record)
            local.fsdp_post_all_gather = _gathered
            record._init_extensions()


if __name__ == "__main__":
    main(
        one_rank_bf16_policy,
        one_rank_bf16_policy_compiled,
        one_rank_float32,
        two_ranks_over_gloo,
    )
