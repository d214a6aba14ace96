"""Index maps against brute force, on random shapes and splits."""

import functools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
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

from distprune.ranks.collectives import clear_caches_of_meshes
from distprune.shards import geometry, reader
from distprune.shards.geometry import dim_coordinates, index_map, memory_order, run_index_map
from distprune.shards.reader import ShardReader
from helpers.sampling import num_examples

shapes = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


@st.composite
def cuts(draw):
    """A shape and a list of (dim, number of chunks): how a mesh cuts it."""
    shape = draw(shapes)
    if not shape:
        return shape, []
    dims = st.integers(0, len(shape) - 1)
    return shape, draw(st.lists(st.tuples(dims, st.integers(1, 4)), max_size=3))


def all_ranks(cut):
    """Every combination of chunks: one list of splits per rank."""
    ranks = [[]]
    for dim, num_chunks in cut:
        ranks = [[*r, (dim, num_chunks, which)] for r in ranks for which in range(num_chunks)]
    return ranks


def cut_by_torch(whole, splits):
    for split in splits:
        dim, num_chunks, chunk = split
        chunks = whole.chunk(num_chunks, dim)
        whole = chunks[chunk] if chunk < len(chunks) else whole.narrow(dim, 0, 0)
    return whole


@settings(max_examples=num_examples(400), deadline=None, derandomize=True)
@given(cuts(), st.randoms(use_true_random=False))
def test_every_rank_knows_where_its_elements_are(case, random):
    shape, cut = case
    whole = torch.arange(math.prod(shape)).view(shape)
    seen = []
    for splits in all_ranks(cut):
        local = cut_by_torch(whole, splits)
        coordinates = dim_coordinates(shape, splits)
        assert tuple(map(len, coordinates)) == tuple(local.shape)
        order = list(range(len(shape)))
        random.shuffle(order)
        for dims in (list(range(len(shape))), order):
            index = index_map(shape, coordinates, dims)
            flat = local.permute(dims).reshape(-1)
            assert torch.equal(index(torch.arange(flat.numel())), flat)
        seen.append(local.reshape(-1))
    assert torch.equal(torch.cat(seen).sort().values, whole.reshape(-1))


@settings(max_examples=num_examples(100), deadline=None, derandomize=True)
@given(cuts(), st.randoms(use_true_random=False))
def test_in_ascending_order_an_index_has_a_position(case, random):
    """Row-major parts, and runs of row-major memory, are ascending; ``positions_of`` counts."""
    shape, cut = case
    numel = math.prod(shape)
    for splits in all_ranks(cut):
        coordinates = dim_coordinates(shape, splits)
        size = math.prod(len(rows) for rows in coordinates)
        in_order = index_map(shape, coordinates, range(len(shape)))
        assert in_order.is_ascending
        shuffled = index_map(shape, coordinates, random.sample(range(len(shape)), len(shape)))
        first = random.randrange(numel)
        stride = torch.empty(shape).stride()
        run = run_index_map(shape, stride, first)
        for index, length in ((in_order, size), (shuffled, size), (run, numel - first)):
            indices = index(torch.arange(length)).tolist()
            if not index.is_ascending:
                continue
            assert indices == sorted(indices)
            for bound in random.choices(range(numel + 1), k=5):
                expected = sum(i < bound for i in indices)
                assert (
                    min(max(int(index.positions_of(np.array([bound]))[0]), 0), length) == expected
                )


def test_memory_that_is_not_row_major_is_not_ascending():
    assert not index_map((2, 3), dim_coordinates((2, 3), []), (1, 0)).is_ascending
    last = run_index_map(
        (2, 3, 2, 2), torch.empty(2, 3, 2, 2).to(memory_format=torch.channels_last).stride(), 3
    )
    assert not last.is_ascending


@given(shapes, st.randoms(use_true_random=False))
def test_dense_tensors_are_read_without_a_copy(shape, random):
    dims = list(range(len(shape)))
    random.shuffle(dims)
    tensor = torch.arange(math.prod(shape)).view(shape).permute(dims)
    order = memory_order(tensor)
    assert order is not None
    assert tensor.permute(order).reshape(-1).data_ptr() == tensor.data_ptr()


def test_tensors_with_gaps_or_overlaps_have_no_order():
    assert memory_order(torch.zeros(4, 6)[:, ::2]) is None
    assert memory_order(torch.zeros(3, 1).expand(3, 5)) is None
    assert memory_order(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)) is not None


def test_more_than_two_to_the_31_elements():
    shape = (2**17, 2**16)
    index = index_map(shape, dim_coordinates(shape, [(1, 2, 1)]), [0, 1])
    assert index(torch.tensor([2**32 - 1])).tolist() == [2**33 - 1]


# Shards on a thousand ranks are those of DTensor, and partition every parameter.


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
            clear_caches_of_meshes()
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
