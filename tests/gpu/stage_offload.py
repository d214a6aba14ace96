"""Policies that keep shards on the CPU: refused by name under FSDP2, and applied under FSDP1."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from on_ranks import run_on_ranks
from stage import Stage, main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
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
    """Two ranks over gloo: pruned elements stay zero through a step of training."""
    for rank, found in enumerate(run_on_ranks(fsdp1, 2, stage.device)):
        stage.check(
            f"rank {rank}: pruned elements are where they were", found["moved"] == 0, str(found)
        )
        stage.check(f"rank {rank}: others were trained", found["trained"] > 0)


def fsdp1(device: torch.device) -> dict[str, int]:
    offload = CPUOffload(offload_params=device.type != "cpu")
    model = FullyShardedDataParallel(
        network(), device_id=device, use_orig_params=True, cpu_offload=offload
    )
    targets = distprune.select(model, everything=True)
    distprune.global_unstructured(targets, distprune.L1Unstructured, amount=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = [getattr(module, name + "_orig").detach().clone() for module, name in targets]
    model(torch.randn(4, 24, device=device)).square().sum().backward()
    optimizer.step()
    moved = trained = 0
    for (module, name), old in zip(targets, values, strict=True):
        mask = getattr(module, name + "_mask").bool().view(-1).to(old.device)
        differs = getattr(module, name + "_orig").detach().view(-1) != old.view(-1)
        moved += int((differs & ~mask).sum())
        trained += int((differs & mask).sum())
    dist.barrier()
    return {"moved": moved, "trained": trained}


if __name__ == "__main__":
    main(fsdp2_without_offload, fsdp2_with_offload, fsdp1_with_offload)
