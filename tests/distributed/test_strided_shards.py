"""Shards of rows that are not contiguous: refused by name, except those of FSDP2 over TP.

A view of a DTensor that merges a dimension with a sharded one, such as [E, F, D] with Shard(1)
seen as [E*F, D], spreads rows that lie apart.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference
from helpers.comparisons import assert_nothing_wrong, changes, snapshot
from helpers.wrappings import local


def holding(parameter):
    module = nn.Module()
    module.weight = nn.Parameter(parameter)
    return module


def index_of(shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def a_view():
    """[4, 6, 3], rows of each expert over 2 ranks, seen as [24, 3]."""
    return distribute_tensor(index_of((4, 6, 3)), init_device_mesh("cpu", (2,)), [Shard(1)]).view(
        24, 3
    )


def a_view_on_two_axes():
    mesh = init_device_mesh("cpu", (1, 2))
    return distribute_tensor(index_of((4, 6, 3)), mesh, [Replicate(), Shard(1)]).view(24, 3)


def by_hand(shape, mesh_shape, placements, rows):
    mesh = init_device_mesh("cpu", mesh_shape)
    part = index_of(shape)[rows[torch.distributed.get_rank()]]
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )


def nothing_to_the_right():
    return by_hand((8, 3), (2,), [_StridedShard(0, split_factor=2)], [[0, 1, 4, 5], [2, 3, 6, 7]])


def another_split_factor():
    rows = [[0, 2], [1, 3], [4, 6], [5, 7]]
    placements = [_StridedShard(0, split_factor=4), Shard(0)]
    return by_hand((8, 3), (2, 2), placements, [rows[i] for i in (0, 2, 1, 3)])


def uneven_and_not_from_fsdp2():
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    return by_hand((7, 3), (2, 2), placements, [[0, 1], [4, 5], [2, 3], [6]])


def a_view_in_fsdp2():
    """A cut of FSDP2 over one that it did not make, which strides."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    experts = distribute_tensor(index_of((4, 6, 3)), mesh["tp"], [Shard(1)])
    return fully_shard(holding(experts.view(24, 3)), mesh=mesh["dp"])


REFUSED = {
    a_view: 2,
    a_view_on_two_axes: 2,
    nothing_to_the_right: 2,
    another_split_factor: 4,
    uneven_and_not_from_fsdp2: 4,
    a_view_in_fsdp2: 4,
}


def pruned(make, call):
    try:
        made = make()
    except RuntimeError as error:
        if "flatten multiple dimensions" not in str(error):
            raise
        return "torch makes no such view", "", []  # up to 2.11
    module = made if isinstance(made, nn.Module) else holding(made)
    placements, before = str(module.weight.placements), snapshot(module)
    try:
        call(module)
    except NotImplementedError as error:
        return str(error), placements, changes(before, snapshot(module))
    return None, placements, []


def magnitude(module):
    prune.l1_unstructured(module, "weight", 0.5)


def everything(module):
    prune.global_unstructured([(module, "weight")], prune.L1Unstructured, amount=0.5)


def rows(module):
    prune.ln_structured(module, "weight", 0.5, n=2, dim=0)


def a_given_mask(module):
    prune.custom_from_mask(module, "weight", torch.ones(module.weight.shape))


@pytest.mark.parametrize("call", [magnitude, everything, rows, a_given_mask])
@pytest.mark.parametrize("make", REFUSED)
def test_rows_that_lie_apart_are_refused(make, call):
    for message, placements, changed in run_ranks(pruned, REFUSED[make], make, call):
        if message == "torch makes no such view":
            pytest.skip(message)
        assert "_S" in placements  # as torch prints a _StridedShard
        assert message is not None and "rows that lie apart" in message and "weight" in message
        assert changed == []


def wrong_where_the_pattern_is_that_of_fsdp2(rows):
    """Placements as FSDP2 makes them, even, on a DTensor that has not met FSDP2."""
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    module = holding(by_hand((8, 3), (2, 2), placements, rows))
    # All scores are equal, so that the index alone decides; twice, so that the mask is read too.
    scores = torch.ones(8, 3)
    for _ in range(2):
        prune.l1_unstructured(module, "weight", 5, importance_scores=scores)
    keep = (torch.arange(24) >= 10).view(8, 3)
    held, expected = local(module.weight_mask), keep[rows[torch.distributed.get_rank()]]
    return [] if torch.equal(held, expected.double()) else [f"mask {held.tolist()}"]


def test_even_shards_with_the_pattern_of_fsdp2_are_pruned():
    rows = [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert_nothing_wrong(run_ranks(wrong_where_the_pattern_is_that_of_fsdp2, 4, rows))


def wrong_under_fsdp2(shape, dims, mesh_shape):
    """FSDP2 over tensor parallelism, uneven: masks against one process, rows by index."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
    dim_of_tp, dim_of_fsdp2 = dims
    tensor = distribute_tensor(index_of(shape), mesh["tp"], [Shard(dim_of_tp)])
    module = fully_shard(
        holding(tensor), mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(dim_of_fsdp2)
    )
    which = local(module.weight).long()
    [keep] = reference.prune([index_of(shape)], 0.4)
    prune.l1_unstructured(module, "weight", 0.4)
    expected = keep.flatten()[which.flatten()].view(which.shape)
    return [] if torch.equal(local(module.weight_mask), expected.bool()) else ["other mask"]


@pytest.mark.parametrize(
    "shape, dims",
    [((9, 3), (0, 0)), ((7, 3), (0, 0)), ((5, 8), (1, 0)), ((8, 3), (0, 0)), ((6, 8), (0, 1))],
)
def test_fsdp2_over_tensor_parallelism_goes_on_working(shape, dims):
    assert_nothing_wrong(run_ranks(wrong_under_fsdp2, 4, shape, dims, (2, 2)))
