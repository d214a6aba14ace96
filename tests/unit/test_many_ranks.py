"""Shards on a thousand ranks are those of DTensor, and partition every parameter.

Each rank of a fake process group in turn: torch's wrappers place the parameters there.
"""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from distprune.shards import geometry, reader
from distprune.shards.geometry import index_map
from distprune.shards.reader import ShardReader
from distprune.testing import clear_dtensor_caches

MESH_AXES = {
    "fsdp2": ("shard",),
    "hsdp": ("replicate", "shard"),
    "fsdp2_tp": ("shard", "tp"),
    "fsdp2_some_tp": ("shard", "tp"),  # norm and head are not parallelised
    "hsdp_tp": ("replicate", "shard", "tp"),
}
PLAN = {
    "embedding": RowwiseParallel, "norm": SequenceParallel, "query": ColwiseParallel,
    "output": RowwiseParallel, "head": ColwiseParallel,
}  # fmt: skip
WRAPPINGS = [
    "fsdp2-1024", "hsdp-8x128", "fsdp2_tp-128x8", "fsdp2_tp-8x128", "fsdp2_some_tp-128x8",
    "hsdp_tp-2x64x8", "fsdp2-1000", "hsdp-3x341", "fsdp2_tp-93x11", "hsdp_tp-3x31x11",
]  # fmt: skip
SIZES = (1201, 120, 333)  # vocabulary, width and inner width: uneven shards, and empty ones


def on_fake_ranks(function, world_size: int, *args, ranks) -> list:
    """Call a function as each of some ranks; collectives do nothing."""
    results = []
    for rank in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            results.append(function(*args))
        finally:
            dist.destroy_process_group()
            clear_dtensor_caches()
    return results


class Block(nn.Module):
    """Some weights of a language model, on the meta device."""

    def __init__(self, vocabulary: int, width: int, inner: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, device="meta")
        self.norm = nn.RMSNorm(width, device="meta")
        self.query = nn.Linear(width, inner, bias=False, device="meta")
        self.output = nn.Linear(inner, width, bias=False, device="meta")
        self.head = nn.Linear(width, vocabulary, bias=False, device="meta")


def mesh_of(wrapping: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    kind, _, shape = wrapping.partition("-")
    return MESH_AXES[kind], tuple(map(int, shape.split("x")))


def wrap(model: nn.Module, wrapping: str) -> nn.Module:
    axes, shape = mesh_of(wrapping)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    if "tp" in axes:
        left_out = ("norm", "head") if "some_tp" in wrapping else ()
        plan = {name: style() for name, style in PLAN.items() if name not in left_out}
        parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
        mesh = mesh[axes[:-1]]
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@functools.cache
def layouts(wrapping: str, sizes: tuple) -> list[tuple]:
    """(shape, placements, axes of its mesh) of each parameter; equal on all ranks."""

    def read() -> list[tuple]:
        parameters = wrap(Block(*sizes), wrapping).parameters()
        return [(p.shape, p.placements, p.device_mesh.mesh_dim_names) for p in parameters]

    return on_fake_ranks(read, math.prod(mesh_of(wrapping)[1]), ranks=[0])[0]


def part_of(layout: tuple, wrapping: str, rank: int) -> tuple:
    """(coordinates of a rank's shard, its replica, the number of replicas), from metadata alone."""
    shape, placements, own_axes = layout
    axes, mesh = mesh_of(wrapping)
    coordinate = [rank // math.prod(mesh[axis + 1 :]) % size for axis, size in enumerate(mesh)]
    # An axis that a parameter does not lie on has copies of it.
    by_axis = dict(zip(own_axes, placements, strict=True))
    placements = [by_axis.get(axis, Replicate()) for axis in axes]
    index, *replica = geometry.placed("parameter", shape, mesh, coordinate, placements)
    return index.coordinates, *replica


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_all_ranks_together_hold_every_element_as_often_as_it_has_replicas(wrapping):
    size = math.prod(mesh_of(wrapping)[1])
    for layout in layouts(wrapping, SIZES):
        held = torch.zeros(layout[0], dtype=torch.int32)
        replicas = torch.zeros(layout[0], dtype=torch.int64)
        for rank in range(size):
            coordinates, replica, num_replicas = part_of(layout, wrapping, rank)
            where = tuple(slice(rows.start, rows.stop) for rows in coordinates)
            held[where] += 1
            replicas[where] += replica
        assert held.eq(num_replicas).all(), layout
        assert replicas.eq(num_replicas * (num_replicas - 1) // 2).all(), layout


def differences(wrapping: str, computed: list) -> list[str]:
    """Parameters of which this rank of a wrapped model holds something else than is computed."""
    model = Block(*SIZES).double().to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    wrong = []
    for layout, (name, p) in zip(computed, wrap(model, wrapping).named_parameters(), strict=True):
        coordinates, *_ = part_of(layout, wrapping, dist.get_rank())
        index = index_map(p.shape, coordinates, range(p.ndim))
        shard = reader.local_shard(name, p, None)
        values, positions = p.to_local().reshape(-1).long(), torch.arange(p.to_local().numel())
        for where in (index(positions), shard.index(positions)):
            wrong += [name] * (not torch.equal(values, where))
    return wrong


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_wrapped_model_holds_what_is_computed(wrapping):
    shape = mesh_of(wrapping)[1]
    size = math.prod(shape)
    ranks = [0, 1, shape[-1] - 1, size // 2 + 3, size - 1]
    found = on_fake_ranks(differences, size, wrapping, layouts(wrapping, SIZES), ranks=ranks)
    assert found == [[]] * len(ranks)


def lists_of_ranks() -> list:
    mesh = init_device_mesh("cpu", (128, 8))
    module = nn.Module()
    for name in "abc":
        weight = distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0)] * 2, src_data_rank=None)
        setattr(module, name, nn.Parameter(weight))
    reader = ShardReader()
    return [reader.read(module, name, name).ranks for name in "abc"]


def test_parameters_of_one_mesh_share_their_list_of_ranks():
    """Ten thousand parameters on as many ranks would have a hundred million numbers otherwise."""
    first, *others = on_fake_ranks(lists_of_ranks, 1024, ranks=[5])[0]
    assert first == tuple(range(1024))
    assert all(ranks is first for ranks in others)
