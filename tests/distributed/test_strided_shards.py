"""Shards of rows that lie apart: one even cut of equal groups of rows, and FSDP2 over TP.

A view of a DTensor that merges a dimension with a sharded one, such as [E, F, D] with Shard(1)
seen as [E*F, D], spreads rows that lie apart; so does transformers' tensor parallelism of fused
weights. What is cut unevenly, or several times, is refused by name.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import distprune as prune
from distprune.base.blocks import WeightLayout
from distprune.reconstruction import positions_of
from distprune.shards.reader import ShardReader
from distprune.testing import run_ranks
from helpers import reference
from helpers.comparisons import assert_nothing_wrong, other_errors, outcome
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


def gates_and_ups():
    """[experts, gate and up, in], as transformers' packed_colwise cuts fused experts."""
    shape, mesh = (3, 8, 4), init_device_mesh("cpu", (2,))
    first = 2 * torch.distributed.get_rank()
    part = index_of(shape)[:, [first, first + 1, first + 4, first + 5]]
    placements = [_StridedShard(1, split_factor=2)]
    return DTensor.from_local(part.contiguous(), mesh, placements, run_check=False)


def gates_and_ups_in_fsdp2():
    """The same on two ranks of four; FSDP2 shards the experts, unevenly."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    first = 2 * mesh["tp"].get_local_rank()
    part = index_of((3, 8, 4))[:, [first, first + 1, first + 4, first + 5]]
    placements = [_StridedShard(1, split_factor=2)]
    tensor = DTensor.from_local(part.contiguous(), mesh["tp"], placements, run_check=False)
    return fully_shard(holding(tensor), mesh=mesh["dp"])


def unevenly():
    """Groups of three rows over two ranks."""
    rows = [[0, 1, 3, 4], [2, 5]]
    return by_hand((6, 3), (2,), [_StridedShard(0, split_factor=2)], rows)


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


FOLDED = {
    a_view: 2,
    a_view_on_two_axes: 2,
    nothing_to_the_right: 2,
    gates_and_ups: 2,
    gates_and_ups_in_fsdp2: 4,
}
REFUSED = {unevenly: 2, another_split_factor: 4, uneven_and_not_from_fsdp2: 4, a_view_in_fsdp2: 4}


def magnitude(module):
    prune.l1_unstructured(module, "weight", 0.5)


def everything(module):
    prune.global_unstructured([(module, "weight")], prune.L1Unstructured, amount=0.5)


def rows(module):
    prune.ln_structured(module, "weight", 0.5, n=2, dim=0)


def a_given_mask(module):
    prune.custom_from_mask(module, "weight", torch.ones(module.weight.shape))


def not_refused(makers):
    wrong = []
    for make in makers:
        for call in (magnitude, everything, rows, a_given_mask):
            made = make()
            module = made if isinstance(made, nn.Module) else holding(made)
            assert "_S" in str(module.weight.placements)  # as torch prints a _StridedShard
            found = outcome(module, lambda call=call, module=module: call(module))
            text = "weight(.|\n)*rows that lie apart"
            when = f"{make.__name__} {call.__name__}"
            wrong += other_errors([found], "NotImplementedError", text, when)
    return wrong


@pytest.mark.parametrize("size", [2, 4])
def test_rows_that_lie_apart_are_refused(size):
    makers = [make for make, own in REFUSED.items() if own == size]
    assert_nothing_wrong(run_ranks(not_refused, size, makers))


def folded(make):
    """Prune in every way, beside a plain module; verify, and remove."""
    made = make()
    sharded = made if isinstance(made, nn.Module) else holding(made)
    which, shape = local(sharded.weight).long(), sharded.weight.shape
    plain, wrong = holding(index_of(shape)), []
    generator = torch.Generator().manual_seed(0)
    ties = torch.randn(shape, generator=generator).mul(2).round()
    columns = torch.rand([1] * (len(shape) - 1) + [shape[-1]], generator=generator)
    rows = torch.rand([*shape[:-1], 1], generator=generator)
    factors = prune.FactoredScores([[columns], [rows, columns]])
    mask = torch.randint(2, shape, generator=generator)

    def everything(module, scores, **options):
        prune.global_unstructured(
            [(module, "weight")], prune.L1Unstructured, {(module, "weight"): scores}, **options
        )

    def along(module, **options):
        last = {(module, "weight"): len(shape) - 1}
        everything(module, ties, input_dims=last, **options)

    calls = {
        "ties": lambda m: prune.l1_unstructured(m, "weight", 0.2, importance_scores=ties),
        "values": lambda m: prune.l1_unstructured(m, "weight", 0.2),
        "all": lambda m: everything(m, ties, amount=0.2),
        "factors": lambda m: everything(m, factors, amount=0.4),
        "normalised": lambda m: everything(m, factors, amount=0.4, normalize="rms"),
        "rows": lambda m: along(m, amount=0.5, scope="row"),
        "1:2": lambda m: along(m, pattern="1:2") if shape[-1] % 2 == 0 else None,
        "a mask": lambda m: prune.custom_from_mask(m, "weight", mask),
    }
    for dim in range(len(shape)):
        calls[f"dim {dim}"] = lambda m, dim=dim: prune.ln_structured(m, "weight", 1, n=2, dim=dim)
    for name, call in calls.items():
        call(sharded), call(plain)
        if not hasattr(plain, "weight_mask"):
            continue
        keep = plain.weight_mask.flatten()[which.flatten()].view(which.shape) != 0
        if not torch.equal(local(sharded.weight_mask) != 0, keep):
            wrong.append(name)
        reports = [prune.verify(each, raise_errors=False) for each in (sharded, plain)]
        wrong += [f"{name}: {problem}" for problem in reports[0].all_problems]
        if len({report.parameters[0].fingerprint for report in reports}) != 1:
            wrong.append(f"{name}: another fingerprint")
        prune.remove(sharded, "weight"), prune.remove(plain, "weight")
        if bool(local(sharded.weight)[~keep].any()):
            wrong.append(f"{name}: remove left no zeros")
        with torch.no_grad():
            local(sharded.weight).copy_(which), plain.weight.copy_(index_of(shape))
    shard = ShardReader().read(sharded, "weight", "weight")
    layout = WeightLayout("linear" if len(shape) == 2 else "experts", tuple(shape))
    rows, columns = positions_of(shard, layout)
    at = rows.view(-1, 1) + columns
    is_here = (at >= 0) & (at < which.numel())
    elements = index_of(shape).view(at.shape)[is_here]
    if len(elements) != which.numel() or not torch.equal(elements, shard.flat_values[at[is_here]]):
        wrong.append(f"positions of {elements.tolist()}")
    return wrong


@pytest.mark.parametrize("make", FOLDED)
def test_a_part_of_each_group_of_rows(make):
    assert_nothing_wrong(run_ranks(folded, FOLDED[make], make))


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


@pytest.mark.parametrize("shape, dims", [((7, 3), (0, 0)), ((5, 8), (1, 0)), ((6, 8), (0, 1))])
def test_fsdp2_over_tensor_parallelism_goes_on_working(shape, dims):
    assert_nothing_wrong(run_ranks(wrong_under_fsdp2, 4, shape, dims, (2, 2)))
