"""Policies that keep shards on the CPU: refused by name under FSDP2, and applied under FSDP1."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from on_ranks import run_on_ranks
from stage import Stage, main
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    OffloadPolicy,
    fully_shard,
)

import distprune


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 33), nn.ReLU(), nn.Linear(33, 8))


def fsdp2_without_offload(stage: Stage) -> None:
    """The policy that offloads nothing."""
    found = run_on_ranks(fsdp2, 1, stage.device, False)[0]
    stage.check("it is pruned", found["error"] is None, str(found["error"]))
    stage.check("half of it", found["zeros"] == found["expected"], str(found))


def fsdp2_with_offload(stage: Stage) -> None:
    found = run_on_ranks(fsdp2, 1, stage.device, True)[0]
    if stage.device.type == "cpu":  # where there is nothing to offload
        stage.check("it is pruned", found["error"] is None, str(found["error"]))
        return
    error = found["error"] or ""
    is_named = error.startswith("NotImplementedError") and "CPUOffloadPolicy" in error
    stage.check("the policy is refused by name", is_named, error)
    stage.check("nothing has changed", found["is_unchanged"])


def fsdp2(device: torch.device, is_offloaded: bool) -> dict[str, Any]:
    model = network()
    if not is_offloaded:
        model.to(device)
    policy = CPUOffloadPolicy(pin_memory=False) if is_offloaded else OffloadPolicy()
    fully_shard(model, mesh=init_device_mesh(device.type, (1,)), offload_policy=policy)
    before = {name: value.to_local().clone() for name, value in model.state_dict().items()}
    found: dict[str, Any] = {"error": None, "zeros": None, "expected": None}
    targets = distprune.select(model, everything=True)
    try:
        distprune.global_unstructured(targets, distprune.L1Unstructured, amount=0.5)
        masks = [module.weight_mask.to_local() for module, _ in targets]
        found["zeros"] = sum(int((~mask.bool()).sum()) for mask in masks)
        found["expected"] = round(0.5 * sum(mask.numel() for mask in masks))
    except NotImplementedError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    after = {name: value.to_local() for name, value in model.state_dict().items()}
    found["is_unchanged"] = list(after) == list(before) and all(
        torch.equal(after[name], before[name]) for name in before
    )
    return found


def fsdp1_with_offload(stage: Stage) -> None:
    check_fsdp1(stage, None)


def fsdp1_with_offload_and_bf16(stage: Stage) -> None:
    check_fsdp1(stage, "bfloat16")


def check_fsdp1(stage: Stage, dtype: str | None) -> None:
    """Two ranks over gloo: training, another pruning, reading, and the end of pruning."""
    for rank, found in enumerate(run_on_ranks(fsdp1, 2, stage.device, dtype)):
        for step in ("first", "second"):
            moved, trained = found[f"{step} step"]
            where = f"rank {rank}, {step} step"
            stage.check(f"{where}: pruned elements are where they were", moved == 0, f"{moved}")
            stage.check(f"{where}: others were trained", trained > 0, f"{trained}")
        wrong = found["pruned values that are read"]
        stage.check(f"rank {rank}: pruned values are 0 when read", wrong == 0, f"{wrong}")
        zeros, expected = found["zeros"], found["expected zeros"]
        stage.check(f"rank {rank}: exactly as many zeros as wanted", zeros == expected, f"{zeros}")
        stage.check(f"rank {rank}: verify finds nothing", not found["problems"], found["problems"])
        stage.check(f"rank {rank}: removed", found["zeros after"] == expected)


def fsdp1(device: torch.device, dtype: str | None) -> dict[str, Any]:
    offload = CPUOffload(offload_params=device.type != "cpu")
    precision = MixedPrecision(param_dtype=getattr(torch, dtype)) if dtype else None
    model = FullyShardedDataParallel(
        network(),
        device_id=device,
        use_orig_params=True,
        cpu_offload=offload,
        mixed_precision=precision,
    )
    targets = distprune.select(model, everything=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(1)).to(device)
    found: dict[str, Any] = {}
    # The masks of the second pruning are made after FSDP1 has moved those of the first.
    for step, amount in (("first", 0.5), ("second", 0.3)):
        distprune.global_unstructured(targets, distprune.L1Unstructured, amount=amount)
        found[f"{step} step"] = train(model, x, optimizer, targets)
    values = [(getattr(m, n).detach().cpu(), mask_of(m, n).cpu()) for m, n in targets]
    found["pruned values that are read"] = sum(int((v[~k] != 0).sum()) for v, k in values)
    num_weights = 24 * 33 + 33 * 8
    first = round(0.5 * num_weights)
    found["expected zeros"] = first + round(0.3 * (num_weights - first))
    found["zeros"] = total(sum(int((~keep).sum()) for _, keep in values))
    report = distprune.verify(model)
    found["problems"] = "" if report.ok else str(report)
    for module, name in targets:
        distprune.remove(module, name)
    found["zeros after"] = total(sum(int((getattr(m, n) == 0).sum()) for m, n in targets))
    model(x)
    dist.barrier()
    return found


def train(
    model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, targets: Any
) -> tuple[int, int]:
    """A step; how many pruned elements, and how many others, it changed on this rank."""
    values = [getattr(module, name).detach().clone() for module, name in targets]
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
    moved = trained = 0
    for (module, name), old in zip(targets, values, strict=True):
        mask = mask_of(module, name).to(old.device)
        differs = getattr(module, name).detach().view(-1) != old.view(-1)
        moved += int((differs & ~mask).sum())
        trained += int((differs & mask).sum())
    return moved, trained


def mask_of(module: nn.Module, name: str) -> Tensor:
    mask: Tensor = getattr(module, name + "_mask")
    return mask.view(-1)


def total(number: int) -> int:
    """The sum over the ranks."""
    numbers = torch.tensor(number)
    dist.all_reduce(numbers)
    return int(numbers)


if __name__ == "__main__":
    main(
        fsdp2_without_offload,
        fsdp2_with_offload,
        fsdp1_with_offload,
        fsdp1_with_offload_and_bf16,
    )
