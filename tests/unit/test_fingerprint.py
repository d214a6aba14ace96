"""The fingerprint of a mask: the same on every sharding, and another one for any other mask."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distprune.masks import fingerprint
from distprune.masks.fingerprint import fingerprint_parts
from distprune.shards.geometry import dim_coordinates, index_map, memory_order, run_index_map
from distprune.shards.shard import Shard
from helpers.sampling import num_examples

DTYPES = (torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def random_mask(shape, seed=0, dtype=torch.bool):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) > 0.4).to(dtype)


def part_of(mask, splits):
    """(shard, its part of the mask), with dimensions in the order of the mask's memory."""
    coordinates = dim_coordinates(mask.shape, splits)
    local = mask
    for dim, held in enumerate(coordinates):
        local = local.narrow(dim, held.start, len(held))
    local = local.contiguous() if local.is_contiguous() or not local.numel() else local.clone()
    order = memory_order(local) or list(range(local.ndim))
    shard = Shard(
        name="p",
        parameter=local,
        values=local,
        mask=local,
        shape=mask.shape,
        index=index_map(mask.shape, coordinates, order),
    )
    return shard, local


def run_of(mask, start, stop):
    """The same of a run of elements in the order of memory, as FSDP1 cuts."""
    order = memory_order(mask)
    local = mask.permute(order).reshape(-1)[start:stop]
    index = run_index_map(tuple(mask.shape), mask.stride(), start)
    return Shard("p", local, local, local, mask.shape, index, is_run=True), local


def fingerprint_of(parts):
    total = sum(fingerprint_parts(*zip(*parts, strict=True)))
    return (total + 2**63) % 2**64 - 2**63


def by_definition(mask):
    """In Python's integers, one element after the other."""
    flags = [value == 0 for value in mask.double().contiguous().view(-1).tolist()]
    cpu = torch.device("cpu")
    table = fingerprint._odd(0, (1 << 15) - 1, 3, cpu).tolist()
    total = 0
    for start in range(0, len(flags), 32):
        word = sum(1 << bit for bit, pruned in enumerate(flags[start : start + 32]) if pruned)
        which, low = divmod(start // 32, len(table))
        total += word * table[low] * int(fingerprint._odd(which, which, 4, cpu))
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 9), (3, 70), (130, 96), (3, 5, 11)])
def test_it_is_what_it_says(dtype, shape):
    mask = random_mask(shape, dtype=dtype)
    assert fingerprint_of([part_of(mask, [])]) == by_definition(mask)
    with mock.patch("distprune.base.memory.takes_numpy", lambda device: False):
        assert fingerprint_of([part_of(mask, [])]) == by_definition(mask)


@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0)])
@pytest.mark.parametrize("shape", [(5, 3, 4, 7), (4, 64, 3, 3), (2, 6, 9, 80)])
def test_no_sharding_changes_it(shape, order, numpy):
    mask = random_mask(shape)
    expected = by_definition(mask)
    back = sorted(range(4), key=order.__getitem__)
    mask = mask.permute(order).contiguous().permute(back)  # another order of memory
    with mock.patch("distprune.base.memory.takes_numpy", lambda device: numpy):
        for dim in range(4):
            for size in (2, 3, 8):
                parts = [part_of(mask, [(dim, size, which)]) for which in range(size)]
                assert fingerprint_of(parts) == expected
        grid = [[(0, 2, i), (3, 3, j)] for i in range(2) for j in range(3)]
        assert fingerprint_of(part_of(mask, splits) for splits in grid) == expected
        edges = [0, 1, mask.numel() // 3, mask.numel() // 3, mask.numel()]
        runs = [run_of(mask, *edges[i : i + 2]) for i in range(4)]
        assert fingerprint_of(runs) == expected


@settings(max_examples=num_examples(300), deadline=None, derandomize=True)
@given(st.data())
def test_any_change_shows(data):
    """One bit that is flipped, and two bits that are exchanged, wherever they are."""
    size = data.draw(st.integers(2, 3000))
    mask = random_mask((size,), data.draw(st.integers(0, 99)))
    places = st.integers(0, size - 1)
    first, second = data.draw(places), data.draw(places)
    flipped, exchanged = mask.clone(), mask.clone()
    flipped[first] = ~flipped[first]
    exchanged[first], exchanged[second] = mask[second].clone(), mask[first].clone()
    of_mask = fingerprint_of([part_of(mask, [])])
    assert fingerprint_of([part_of(flipped, [])]) != of_mask
    is_same = torch.equal(exchanged, mask)
    assert (fingerprint_of([part_of(exchanged, [])]) == of_mask) == is_same


def test_the_last_bits_of_two_words_may_not_be_exchanged():
    masks = []
    for pruned in range(31, 32 * 500, 32):
        mask = torch.ones(32 * 500)
        mask[pruned] = 0
        masks.append(fingerprint_of([part_of(mask, [])]))
    assert len(set(masks)) == 500
    # Differences of sums show the same: pairs of words in many ways.
    assert len({a + b for i, a in enumerate(masks) for b in masks[:i]}) == math.comb(500, 2)


def test_true_bytes_other_than_one_keep():
    mask = random_mask((100, 3))
    odd = (mask.view(torch.uint8) * 7).view(torch.bool)
    assert fingerprint_of([part_of(odd, [])]) == by_definition(mask)


def test_a_mask_of_ones_is_zero():
    assert fingerprint_of([part_of(torch.ones(40, 50), [])]) == 0
