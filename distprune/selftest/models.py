"""Small models, every way to wrap them, and their expected masks.

The reference is numpy and one sort. The elements of a rank are determined without distprune: a
copy of the model is filled with the index of each element and wrapped in the same way, so that the
rank's part of it *is* the list of its indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from distprune._common.pruned_form import local_tensor

WEIGHTS = ("l1.weight", "l2.weight", "l3.weight")


class Net(nn.Module):
    """Three linear layers; most numbers of ranks do not divide their 10 and 5 rows."""

    def __init__(self, num_inputs: int, num_hidden: int) -> None:
        super().__init__()
        self.l1 = nn.Linear(num_inputs, num_hidden)
        self.l2 = nn.Linear(num_hidden, 10)
        self.l3 = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.l3(torch.tanh(self.l2(torch.relu(self.l1(x)))))
        return output


@torch.no_grad()
def net(values: str, num_ranks: int, *, num_inputs: int = 6) -> Net:
    """A model on the CPU, the same on every rank.

    Args:
        values: "distinct"; "tied", a few multiples of 1/4; "equal", all of one magnitude;
            "indices", each element's row-major index.
        num_ranks: divides the number of hidden units, as tensor parallelism needs.
        num_inputs: width of the first layer.
    """
    model = Net(num_inputs, num_ranks * -(-2 * num_inputs // num_ranks))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        shape = parameter.shape
        content = torch.randn(shape, generator=generator)
        if values == "tied":
            content = (content * 4).round() / 4
        elif values == "equal":
            content = torch.full(shape, 0.5).copysign(content)
        elif values == "indices":
            content = torch.arange(shape.numel(), dtype=torch.float32).view(shape)
        parameter.copy_(content)
    return model


@dataclass(frozen=True)
class Wrapping:
    """One way to wrap a model.

    Attributes:
        name: its name in the table.
        adapters: the adapters whose private fields it needs, keys of torch_private.private_fields.
        min_ranks: the smallest number of ranks.
        num_axes: number of mesh axes; two axes need an even number of ranks.
        batch_axes: the mesh axes whose ranks have different parts of a batch.
    """

    name: str
    adapters: tuple[str, ...]
    min_ranks: int = 1
    num_axes: int = 1
    batch_axes: tuple[int, ...] = (0,)

    def why_not(self, num_ranks: int) -> str | None:
        """Why it cannot run on this number of ranks; None if it can."""
        if num_ranks < self.min_ranks:
            return f"needs {self.min_ranks} ranks"
        return "needs an even number of ranks" if num_ranks % self.num_axes else None

    def mesh_shape(self, num_ranks: int) -> tuple[int, ...]:
        """The shape of a mesh of all ranks."""
        return (num_ranks,) if self.num_axes == 1 else (num_ranks // 2, 2)

    def part(self, num_ranks: int, rank: int) -> tuple[int, int]:
        """(index of a rank's part of a batch, number of parts)."""
        shape = self.mesh_shape(num_ranks)
        coordinate = np.unravel_index(rank, shape)
        index, num_parts = 0, 1
        for axis in self.batch_axes:
            index = index * shape[axis] + int(coordinate[axis])
            num_parts *= shape[axis]
        return index, num_parts

    def wrap(self, model: nn.Module, device: torch.device, num_ranks: int) -> nn.Module:
        """Wrap a model on this rank's device."""
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
        from torch.distributed.tensor import parallel

        shape = self.mesh_shape(num_ranks)
        names = ("outer", "inner")[-len(shape) :]
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        if "TP" in self.name:
            plan = {"l1": parallel.ColwiseParallel(), "l2": parallel.RowwiseParallel()}
            model = parallel.parallelize_module(model, mesh["inner"], plan)
            mesh = mesh["outer"] if len(shape) == 2 else mesh
        if "DDP" in self.adapters:
            return nn.parallel.DistributedDataParallel(model)
        if "FSDP1" in self.adapters:
            hybrid: dict[str, Any] = {
                "device_mesh": mesh,
                "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
            }
            return FullyShardedDataParallel(
                model,
                device_id=device,
                use_orig_params=True,
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                **(hybrid if len(shape) == 2 else {}),
            )
        for layer in (*model.children(), model) if "FSDP2" in self.adapters else ():
            fully_shard(layer, mesh=mesh)  # in place
        return model


WRAPPINGS = (
    Wrapping("plain", ("Module",), batch_axes=()),
    Wrapping("DDP", ("DDP",)),
    Wrapping("FSDP1", ("FSDP1",), min_ranks=2),
    Wrapping("FSDP1 hybrid", ("FSDP1",), min_ranks=4, num_axes=2, batch_axes=(0, 1)),
    Wrapping("FSDP2", ("FSDP2", "DTensor")),
    Wrapping("HSDP", ("FSDP2", "DTensor"), min_ranks=4, num_axes=2, batch_axes=(0, 1)),
    Wrapping("TP", ("DTensor",), batch_axes=()),
    Wrapping("FSDP2 + TP", ("FSDP2", "DTensor"), min_ranks=4, num_axes=2),
)


@dataclass(frozen=True)
class Case:
    """The argument of every check: one way to wrap models, on this rank.

    Attributes:
        wrapping: how models are wrapped.
        device: of this rank.
    """

    wrapping: Wrapping
    device: torch.device

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def num_ranks(self) -> int:
        return dist.get_world_size()

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The model on this rank's device, wrapped."""
        return self.wrapping.wrap(model.to(self.device), self.device, self.num_ranks)

    def indices(self) -> list[np.ndarray]:
        """For each of ``WEIGHTS``, the row-major indices of this rank's elements."""
        model = self.wrapped(net("indices", self.num_ranks))
        return [local_values(module, name).astype(np.int64) for module, name in weights_of(model)]


def weights_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The (module, name) pairs of ``WEIGHTS``, found without distprune."""
    modules = {name.split(".")[-1]: module for name, module in model.named_modules()}
    layers = [modules[name.split(".")[0]] for name in WEIGHTS]
    # FSDP1 registers the wrapped module one level below.
    return [(getattr(layer, "module", layer), "weight") for layer in layers]


def local_values(module: nn.Module, name: str) -> np.ndarray:
    """A copy of this rank's part of a parameter or mask."""
    tensor = local_tensor(getattr(module, name).detach())
    return tensor.clone().cpu().numpy()


def reference_masks(
    values: Sequence[np.ndarray], amount: int | float, keeps: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Masks (True: keep) after one more pruning of whole parameters by magnitude.

    The order is (magnitude, position in the list, row-major index), among the elements that are
    not pruned yet; exactly ``amount`` elements, or this share of them, are pruned.
    """
    sizes = [whole.size for whole in values]
    magnitudes = np.abs(np.concatenate([whole.reshape(-1) for whole in values]).astype(np.float64))
    positions = np.repeat(np.arange(len(sizes)), sizes)
    indices = np.concatenate([np.arange(size) for size in sizes])
    kept = np.concatenate([keep.reshape(-1) for keep in keeps])
    order = np.lexsort((indices, positions, magnitudes))
    order = order[kept[order]]
    k = amount if isinstance(amount, int) else round(amount * len(order))
    kept[order[:k]] = False
    parts = np.split(kept, np.cumsum(sizes)[:-1])
    return [part.reshape(whole.shape) for part, whole in zip(parts, values, strict=True)]
