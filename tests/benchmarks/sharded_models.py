"""Shard language models, prune them, check the masks and the traffic of every rank, and undo it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import data
import torch
import torch.distributed as dist
from measuring import CheckFailed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import distprune
from distprune.call.report import PruningReport

AMOUNT = 0.5
COLWISE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWWISE = ("o_proj", "down_proj")


def shard(model: data.LanguageModel, wrapping: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if wrapping == "fsdp2":
        for module in (*model.layers, model.embed_tokens, model.lm_head, model):
            fully_shard(module, mesh=mesh)
        return
    plan: dict[str, Any] = {
        "embed_tokens": RowwiseParallel(), "lm_head": ColwiseParallel(), "norm": SequenceParallel(),
    }  # fmt: skip
    for name in COLWISE:
        plan[f"layers.*.{name}"] = ColwiseParallel()
    for name in ROWWISE:
        plan[f"layers.*.{name}"] = RowwiseParallel()
    for name in ("input_norm", "output_norm"):
        plan[f"layers.*.{name}"] = SequenceParallel()
    parallelize_module(model, mesh, plan, src_data_rank=None)


def prune(targets: Sequence[tuple[nn.Module, str]], amount: float = AMOUNT) -> PruningReport:
    return distprune.global_unstructured(targets, distprune.L1Unstructured, amount=amount)


def placed(model: nn.Module) -> list[tuple[Tensor, Tensor | None]]:
    """Every parameter and its mask, as they lie on the ranks."""
    return [
        (
            module._parameters.get(name + "_orig", module._parameters.get(name)),
            module._buffers.get(name + "_mask"),
        )
        for module, name in data.pairs(model)
    ]


def local_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor, as torch itself cuts it."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh: DeviceMesh = parameter.device_mesh
    cut = distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None)
    return cut.to_local().clone()


def check_local_masks(model: nn.Module, keeps: Sequence[Tensor]) -> None:
    """Every bit on this rank.

    Raises:
        CheckFailed: names the parameter.
    """
    for which, ((_, mask), keep) in enumerate(zip(placed(model), keeps, strict=True)):
        if mask is None or not torch.equal(data.local(mask) != 0, keep):
            raise CheckFailed(f"rank {dist.get_rank()}: the mask of parameter {which} is wrong")
