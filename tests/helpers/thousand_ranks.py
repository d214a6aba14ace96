"""One pruning call on a thousand ranks in one process: their shards, masks and traffic.

Placements come from torch's own wrappers on a fake process group, and define each rank's shards.
The ranks of a call are virtual ranks, which really reduce.

A wrapping is written "kind-mesh", as in wrappings.py, e.g. "fsdp2_tp-128x8".
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

import distprune
from distprune.api.global_unstructured import global_arguments
from distprune.call.report import PruningReport
from distprune.call.run import prune_parameters
from distprune.ranks.collectives import Communicator
from distprune.shards.dtensor import replica_of, splits_of
from distprune.shards.geometry import IndexMap, dim_coordinates, index_map
from helpers.fake_ranks import run_fake_ranks
from helpers.virtual_ranks import run_virtual_ranks

MESH_AXES = {
    "fsdp2": ("shard",),
    "hsdp": ("replicate", "shard"),
    "fsdp2_tp": ("shard", "tp"),
    "fsdp2_some_tp": ("shard", "tp"),  # norm and head are not parallelised
    "hsdp_tp": ("replicate", "shard", "tp"),
}
PLAN = {
    "embedding": RowwiseParallel, "norm": SequenceParallel, "query": ColwiseParallel,
    "key": ColwiseParallel, "output": RowwiseParallel, "gate": ColwiseParallel,
    "down": RowwiseParallel, "head": ColwiseParallel,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Block. By default shards are uneven even on a small mesh, and some are empty."""

    vocabulary: int = 1201
    width: int = 120
    key_width: int = 30
    inner: int = 333


DEFAULT = Sizes()


class Block(nn.Module):
    """The weights of a language model with one decoder layer, on the meta device."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.embedding = nn.Embedding(sizes.vocabulary, width, device="meta")
        self.norm = nn.RMSNorm(width, device="meta")
        self.query = _linear(width, width)
        self.key = _linear(width, sizes.key_width)
        self.output = _linear(width, width)
        self.gate = _linear(width, sizes.inner)
        self.down = _linear(sizes.inner, width)
        self.head = _linear(width, sizes.vocabulary)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, device="meta")


def mesh_axes(wrapping: str) -> tuple[str, ...]:
    return MESH_AXES[wrapping.split("-")[0]]


def mesh_shape(wrapping: str) -> tuple[int, ...]:
    return tuple(int(size) for size in wrapping.split("-")[1].split("x"))


def world_size(wrapping: str) -> int:
    return math.prod(mesh_shape(wrapping))


def wrap(model: nn.Module, wrapping: str) -> nn.Module:
    """Shard a Block as torch does; on every rank of a process group."""
    axes = mesh_axes(wrapping)
    mesh = init_device_mesh("cpu", mesh_shape(wrapping), mesh_dim_names=axes)
    if "tp" in axes:
        left_out = ("norm", "head") if "some_tp" in wrapping else ()
        plan = {name: style() for name, style in PLAN.items() if name not in left_out}
        parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
        mesh = mesh[axes[:-1]]
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@dataclass(frozen=True)
class Layout:
    """How a parameter lies on a mesh, or on the ``axes`` of one."""

    shape: torch.Size
    placements: tuple[Placement, ...]
    axes: tuple[str, ...]


@functools.cache
def layouts(wrapping: str, sizes: Sizes) -> list[Layout]:
    """Layouts of the parameters of a wrapped Block, from torch's wrappers; equal on all ranks."""

    def read() -> list[Layout]:
        parameters = wrap(Block(sizes), wrapping).parameters()
        return [Layout(p.shape, p.placements, p.device_mesh.mesh_dim_names) for p in parameters]

    return run_fake_ranks(read, world_size(wrapping), ranks=[0])[0]


@dataclass(frozen=True)
class Part:
    """The position of a rank's shard in a parameter, its replica, and the number of replicas."""

    coordinates: tuple[range, ...]
    index: IndexMap
    replica: int
    num_replicas: int

    @property
    def numel(self) -> int:
        return math.prod(map(len, self.coordinates))

    @property
    def counted(self) -> range:
        """Positions that this rank counts."""
        n = self.numel
        return range(
            n * self.replica // self.num_replicas, n * (self.replica + 1) // self.num_replicas
        )

    def cut(self, whole: Tensor) -> Tensor:
        for dim, rows in enumerate(self.coordinates):
            whole = whole.narrow(dim, rows.start, len(rows))
        return whole


def part_of(layout: Layout, wrapping: str, rank: int) -> Part:
    """Return a rank's shard, from metadata alone."""
    mesh = mesh_shape(wrapping)
    coordinate = [rank // math.prod(mesh[axis + 1 :]) % size for axis, size in enumerate(mesh)]
    # An axis that a parameter does not lie on has copies of it.
    by_axis = dict(zip(layout.axes, layout.placements, strict=True))
    placements = [by_axis.get(axis, Replicate()) for axis in mesh_axes(wrapping)]
    splits = splits_of("parameter", layout.shape, mesh, coordinate, placements)
    coordinates = dim_coordinates(layout.shape, splits)
    index = index_map(layout.shape, coordinates, range(len(layout.shape)))
    return Part(coordinates, index, *replica_of(mesh, coordinate, placements))


def weights(sizes: Sizes, data: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Whole weights of a Block."""
    generator = torch.Generator().manual_seed(0)
    shapes = [parameter.shape for parameter in Block(sizes).parameters()]
    match data:
        case "normal":
            found = [torch.randn(shape, generator=generator) for shape in shapes]
        case "equal":
            found = [torch.full(shape, -0.5) for shape in shapes]
        case "256 values":
            found = [torch.randint(-128, 128, shape, generator=generator) / 64 for shape in shapes]
        case "row scales":
            found = [torch.randn(shape, generator=generator) for shape in shapes]
            for weight in found:
                scales = torch.randn(len(weight), generator=generator).mul(2).exp()
                weight.mul_(scales.view(-1, *[1] * (weight.ndim - 1)))
        case _:
            raise ValueError(f"no such data: {data!r}")
    return [weight.to(dtype) for weight in found]


def prune_on(
    wrapping: str, whole: Sequence[Tensor], amount: float = 0.5, sizes: Sizes = DEFAULT
) -> tuple[list[PruningReport], list[Tensor]]:
    """Prune a sharded Block by magnitude, through the same code as the public call, on every rank.

    Args:
        wrapping: how it is sharded.
        whole: its weights, in order; from :func:`weights` of the same sizes.

    Returns:
        The report of every rank, and whole masks. Replicas were compared.
    """
    placed = layouts(wrapping, sizes)
    parts = [
        [part_of(layout, wrapping, rank) for layout in placed]
        for rank in range(world_size(wrapping))
    ]

    def shard(rank: int) -> list[nn.Module]:
        modules, mesh_of = [], functools.cache(lambda axes: _mesh(wrapping, axes, rank))
        for part, weight, layout in zip(parts[rank], whole, placed, strict=True):
            with torch.no_grad():
                tensor = DTensor.from_local(
                    part.cut(weight),
                    mesh_of(layout.axes),
                    layout.placements,
                    run_check=False,
                    shape=weight.shape,
                    stride=weight.stride(),
                )
            # nn.Parameter would detach it, and DTensor's cache give it the mesh of another rank.
            tensor._is_param = True
            modules.append(nn.Module())
            modules[-1].weight = tensor.requires_grad_()
        return modules

    sharded = [shard(rank) for rank in range(len(parts))]

    def prune(communicator: Communicator) -> PruningReport:
        targets = [(module, "weight") for module in sharded[communicator.index]]
        return prune_parameters(
            lambda: global_arguments(targets, distprune.L1Unstructured, amount=amount), communicator
        )

    # Placements and cuts are those of fully_shard, but no fully_shard has made them.
    made = mock.patch("distprune.shards.dtensor.splits_of", lambda *args: splits_of(*args[:5]))
    with made:
        reports = run_virtual_ranks(prune, len(parts))
    masks = [torch.full((weight.numel(),), -1, dtype=torch.int8) for weight in whole]
    for mine, modules in zip(parts, sharded, strict=True):
        for part, module, mask in zip(mine, modules, masks, strict=True):
            local = module.weight_mask.to_local().reshape(-1).to(torch.int8)
            indices = part.index(torch.arange(part.numel))
            before = mask[indices]
            assert torch.equal(torch.where(before < 0, local, before), local), "replicas differ"
            mask[indices] = local
    return reports, [mask.view(w.shape) for mask, w in zip(masks, whole, strict=True)]


def _mesh(wrapping: str, axes: tuple[str, ...], rank: int) -> DeviceMesh:
    """Some axes of the mesh as a rank sees them, without process groups, which are slow to make."""
    ranks = torch.arange(world_size(wrapping)).view(mesh_shape(wrapping))
    here = (ranks == rank).nonzero()[0].tolist()
    for axis, name in reversed(list(enumerate(mesh_axes(wrapping)))):
        if name not in axes:
            ranks = ranks.select(axis, here[axis])
    return DeviceMesh("cpu", ranks, mesh_dim_names=axes, _init_backend=False, _rank=rank)
