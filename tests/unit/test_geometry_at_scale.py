"""Our geometry is DTensor's, at 64 to 1024 ranks of a fake process group."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from distprune.shards import dtensor
from distprune.shards.reader import ShardReader
from helpers.fake_ranks import run_fake_ranks


def global_indices(shard):
    """What the shard says of its elements, in the shape of its values."""
    index = shard.index(torch.arange(shard.values.numel()))
    return index.view([shard.values.shape[dim] for dim in shard.order])


def distributed(mesh_shape, shape, placements):
    mesh = init_device_mesh("cpu", mesh_shape)
    whole = torch.arange(shape.numel()).view(shape)
    tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    shard = dtensor.local_shard("w", tensor, None)
    assert torch.equal(global_indices(shard), tensor.to_local())
    return shard.values.numel() if shard.replica == 0 else 0


@pytest.mark.parametrize(
    "mesh_shape, shape, placements",
    [
        ((64,), (1000, 3), [Shard(0)]),
        ((64,), (63, 2), [Shard(0)]),  # empty shards
        ((8, 8), (37, 50), [Shard(0), Shard(1)]),
        ((8, 8), (130, 5), [Shard(0), Shard(0)]),  # nested, uneven
        ((4, 16), (33, 5), [Replicate(), Shard(0)]),
        ((2, 4, 8), (9, 70, 3), [Replicate(), Shard(0), Shard(1)]),
    ],
)
def test_distribute_tensor(mesh_shape, shape, placements):
    shape = torch.Size(shape)
    world_size = torch.Size(mesh_shape).numel()
    owned = run_fake_ranks(distributed, world_size, mesh_shape, shape, placements)
    assert sum(owned) == shape.numel()


@pytest.mark.parametrize("world_size", [256, 1024])
def test_sampled_ranks_of_large_meshes(world_size):
    mesh_shape, shape = (world_size // 8, 8), torch.Size((5003, 77))
    ranks = [0, 1, 7, 8, world_size // 2 + 3, world_size - 1]
    counts = run_fake_ranks(
        distributed, world_size, mesh_shape, shape, [Shard(0), Shard(1)], ranks=ranks
    )
    assert counts[0] > 0


def fsdp_over_tp(rows, columns):
    """FSDP2 over tensor parallelism: each weight is filled with its own indices, then wrapped."""
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size // 4, 4), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(columns, rows, bias=False), nn.Linear(rows, 8, bias=False))
    for layer in model:
        with torch.no_grad():
            layer.weight.copy_(torch.arange(layer.weight.numel()).view_as(layer.weight))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    fully_shard(model, mesh=mesh["dp"])
    owned = []
    for layer in model:
        shard = dtensor.local_shard("w", layer.weight, None)
        assert torch.equal(global_indices(shard), shard.values.long())
        owned.append(shard.values.numel() if shard.replica == 0 else 0)
    return owned


@pytest.mark.parametrize("rows, columns", [(64, 3), (9, 2), (70, 5), (131, 3)])
def test_fsdp2_over_tensor_parallelism(rows, columns):
    """Uneven strided shards included, where torch's own helper is wrong."""
    owned = run_fake_ranks(fsdp_over_tp, 32, rows, columns)
    assert [sum(column) for column in zip(*owned, strict=True)] == [rows * columns, 8 * rows]


def lists_of_ranks(mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    module = nn.Module()
    for name in "abc":
        whole = torch.zeros(8, 3)
        weight = distribute_tensor(whole, mesh, [Shard(0)] * len(mesh_shape), src_data_rank=None)
        setattr(module, name, nn.Parameter(weight))
    reader = ShardReader()
    return [reader.read(module, name, name).ranks for name in "abc"]


def test_parameters_of_one_mesh_share_their_list_of_ranks():
    """Ten thousand parameters on as many ranks would have a hundred million numbers otherwise."""
    first, *others = run_fake_ranks(lists_of_ranks, 1024, (128, 8), ranks=[5])[0]
    assert first == tuple(range(1024))
    assert all(ranks is first for ranks in others)
