"""A thousand ranks: our geometry is DTensor's, shards partition every parameter, and one call sends
them kilobytes.
"""

import functools
import json
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from distprune.shards import dtensor
from distprune.shards.reader import ShardReader
from helpers import reference
from helpers.fake_ranks import run_fake_ranks
from helpers.sampling import every
from helpers.thousand_ranks import (
    Block,
    Sizes,
    layouts,
    mesh_shape,
    part_of,
    prune_on,
    weights,
    world_size,
    wrap,
)

MAX_COLLECTIVES, MAX_BYTES = 32, 256 * 1024
THOUSAND = [
    "fsdp2-1024", "hsdp-8x128", "hsdp-128x8", "fsdp2_tp-128x8", "fsdp2_tp-8x128",
    "fsdp2_some_tp-128x8", "hsdp_tp-2x64x8",
]  # fmt: skip
UNEVEN = ["fsdp2-1000", "hsdp-3x341", "fsdp2_tp-341x3", "fsdp2_tp-93x11", "hsdp_tp-3x31x11"]
LARGE = Sizes(vocabulary=128_256, width=16_384, key_width=1024, inner=53_248)


@pytest.fixture(autouse=True)
def one_thread():
    """Ranks are small here: waking a second thread takes longer than their work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("wrapping", THOUSAND + UNEVEN)
def test_all_ranks_together_hold_and_count_every_element(wrapping):
    for layout in layouts(wrapping, Sizes()):
        held, counted = (torch.zeros(layout.shape.numel(), dtype=torch.int32) for _ in range(2))
        for rank in range(world_size(wrapping)):
            part = part_of(layout, wrapping, rank)
            indices = part.index(torch.arange(part.numel))
            held[indices] += 1
            counted[indices[part.counted.start : part.counted.stop]] += 1
        assert held.eq(part.num_replicas).all(), layout
        assert counted.eq(1).all(), layout


@pytest.mark.parametrize("wrapping", [*THOUSAND, "fsdp2_tp-341x3", "fsdp2_tp-512x8"])
def test_shards_of_a_large_model_add_up(wrapping):
    """Shapes of a model of 405 billion parameters; no tensor of its size is made."""
    for layout in layouts(wrapping, LARGE):
        sizes = [len(part_of(layout, wrapping, r).counted) for r in range(world_size(wrapping))]
        assert sum(sizes) == layout.shape.numel(), layout


def differences(wrapping, computed):
    """Parameters of which this rank of a wrapped model holds something else than is computed."""
    model = Block(Sizes()).double().to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    model = wrap(model, wrapping)
    wrong = []
    for layout, (name, parameter) in zip(computed, model.named_parameters(), strict=True):
        part = part_of(layout, wrapping, torch.distributed.get_rank())
        values = parameter.to_local().reshape(-1).long()
        shard = dtensor.local_shard(name, parameter, None)
        from_shard = shard.index(torch.arange(values.numel()))
        from_part = part.index(torch.arange(part.numel))
        if not torch.equal(values, from_part) or not torch.equal(values, from_shard):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("wrapping", THOUSAND + UNEVEN)
def test_a_wrapped_model_holds_what_is_computed(wrapping):
    computed, size = layouts(wrapping, Sizes()), world_size(wrapping)
    ranks = [0, 1, mesh_shape(wrapping)[-1] - 1, size // 2 + 3, size - 1]
    assert run_fake_ranks(differences, size, wrapping, computed, ranks=ranks) == [[]] * len(ranks)


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


@functools.cache
def expected_masks(data, dtype):
    return reference.prune(weights(Sizes(), data, dtype), 0.5)


def check_call(wrapping, data, dtype=torch.float32):
    """Exact masks, and the same count of collectives and bytes on every rank; returns them."""
    reports, masks = prune_on(wrapping, weights(Sizes(), data, dtype))
    for mask, expected in zip(masks, expected_masks(data, dtype), strict=True):
        assert torch.equal(mask.bool(), expected)
    sent = {(report.num_collectives, report.bytes_sent) for report in reports}
    assert len(sent) == 1
    num_collectives, num_bytes = sent.pop()
    assert num_collectives <= MAX_COLLECTIVES and num_bytes <= MAX_BYTES
    return num_collectives, num_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrapping, data",
    [
        ("hsdp_tp-3x7x3", "row scales"),
        ("fsdp2_some_tp-16x4", "256 values"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [
                *product(["fsdp2-64"], ["normal", "equal", "256 values", "row scales"]),
                ("hsdp-8x8", "256 values"),
                ("fsdp2_tp-8x8", "equal"),
            ]
        ),
    ],
)
def test_the_call_is_exact_on_tens_of_ranks(wrapping, data):
    check_call(wrapping, data)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    "few, many, data, dtype",
    every(
        3,
        [
            ("fsdp2_tp-2x2", "fsdp2_tp-128x8", "256 values", torch.float32),
            ("fsdp2-2", "fsdp2-1024", "normal", torch.float32),
            ("hsdp-2x2", "hsdp-128x8", "row scales", torch.bfloat16),
        ],
    ),
)
def test_a_thousand_ranks_send_what_two_send(few, many, data, dtype):
    """All of the call runs, on every rank."""
    (few_collectives, few_bytes), (num_collectives, num_bytes) = (
        check_call(wrapping, data, dtype) for wrapping in (few, many)
    )
    # Ranks draw samples of their own, and the search in one takes a step more or less: of 16 KiB.
    assert abs(num_collectives - few_collectives) <= 2
    assert abs(num_bytes - few_bytes) <= 2 * 17_000


def test_copies_on_other_meshes_cost_a_text_for_each_mesh():
    """What is left out of tensor parallelism lies on parts of the ranks, once on each."""
    # Equal values: the search sends as much for both, whatever sample it drew.
    on_all, on_some = (
        check_call(wrapping, "equal") for wrapping in ("fsdp2_tp-8x4", "fsdp2_some_tp-8x4")
    )
    assert on_some[0] - on_all[0] == 2
    # Two numbers of each rank; and of each mesh its ranks, and a number for both parameters.
    texts = [json.dumps([[list(range(first, 32, 4))], [0, 0]]) for first in range(4)]
    assert on_some[1] - on_all[1] == 16 * 32 + sum(8 * -(-len(text) // 8) for text in texts)
