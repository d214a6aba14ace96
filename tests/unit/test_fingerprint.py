"""The fingerprint of a mask: the same on every sharding, and another one for any other mask."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distprune.base import memory
from distprune.masks import fingerprint
from distprune.masks.fingerprint import fingerprint_parts
from distprune.shards.geometry import dim_coordinates, index_map, memory_order, run_index_map
from distprune.shards.shard import _WORDS, Shard, at_position, checksums, replicas_agree
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


# The checksum of replicas: the same for the same bits, and another one for any other bits.


DTYPES_OF_CHECKSUM = (
    torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
)  # fmt: skip


def filled(shape, dtype, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50
    return values > 0 if dtype is torch.bool else values.to(dtype)


def checksum(tensor: torch.Tensor) -> int:
    return checksums([torch.ones(3), tensor, torch.ones(2)])[1]


def by_definition_of_checksum(tensor: torch.Tensor) -> int:
    """In Python's integers, from the bytes."""
    from distprune.shards.shard import _block_weight, _weights

    raw = tensor.contiguous()
    raw = torch.view_as_real(raw) if raw.is_complex() else raw
    data = bytes(raw.view(-1).view(torch.uint8).tolist())
    data += bytes(-len(data) % 8)
    weights = _weights().tolist()
    total = 0
    for word in range(len(data) // 8):
        value = int.from_bytes(data[8 * word : 8 * word + 8], "little")
        value ^= value >> 32
        total += value * weights[word % _WORDS] * _block_weight(word // _WORDS)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", DTYPES_OF_CHECKSUM)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 9), (3, 5, 11)])
def test_it_is_what_it_says_of_checksum(dtype, shape):
    tensor = filled(shape, dtype)
    assert checksum(tensor) == by_definition_of_checksum(tensor)
    with mock.patch("distprune.base.memory.takes_numpy", lambda device: False):
        assert checksum(tensor) == by_definition_of_checksum(tensor)


def test_several_blocks_and_odd_addresses():
    tensor = filled((5 * _WORDS + 77,), torch.float32)
    with mock.patch("distprune.shards.shard._DEVICE_BLOCKS", 2):
        for numpy in (True, False):
            with mock.patch.object(memory, "takes_numpy", lambda _, numpy=numpy: numpy):
                assert checksum(tensor) == by_definition_of_checksum(tensor)
                assert checksum(tensor[1:]) == by_definition_of_checksum(tensor[1:].clone())


@settings(max_examples=num_examples(200), deadline=None, derandomize=True)
@given(st.data())
def test_any_one_bit_shows(data):
    dtype = data.draw(st.sampled_from([torch.int16, torch.int32, torch.int64]))
    tensor = torch.randint(-9, 9, (data.draw(st.integers(1, 50)),), dtype=dtype)
    where = data.draw(st.integers(0, len(tensor) - 1))
    bit = data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    other = tensor.clone()
    other[where] ^= torch.tensor(1 << bit if bit < 8 * dtype.itemsize - 1 else -(1 << bit)).to(
        dtype
    )
    assert checksum(other) != checksum(tensor)


def test_the_same_values_elsewhere_show():
    tensor = filled((40, 50), torch.float32)
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(0))
    moved = tensor.view(-1)[order].view(40, 50)
    swapped = tensor.clone()
    swapped[0, 0], swapped[39, 49] = tensor[39, 49], tensor[0, 0]
    assert (
        len({checksum(each) for each in (tensor, moved, swapped, tensor.t().reshape(40, 50))}) == 4
    )
    mask = tensor > 0
    assert checksum(mask) != checksum(mask.flip(0)) and checksum(mask) != checksum(~mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64])
def test_the_last_elements_or_signs_of_words_may_not_be_exchanged(dtype):
    """Times an odd weight, the highest bit of a word is the same wherever the word is."""
    per_word = 8 // dtype.itemsize
    found = set()
    for where in range(per_word - 1, 400 * per_word, per_word):
        tensor = torch.ones(400 * per_word, dtype=dtype)
        tensor[where] = False if dtype is torch.bool else -1
        found.add(checksum(tensor))
    assert len(found) == 400


def test_replicas_that_exchanged_their_shards_show():
    """Two replicas of two shards; the second has each shard in the place of the other."""
    shards = [11, 22]
    first = [at_position(place, shards[place]) for place in (0, 1)]
    exchanged = [at_position(place, shards[1 - place]) for place in (0, 1)]
    assert replicas_agree(2, 2 * sum(first), sum(first))
    assert not replicas_agree(2, sum(first) + sum(exchanged), sum(first))
