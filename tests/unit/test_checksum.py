"""The checksum of replicas: the same for the same bits, and another one for any other bits."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distprune.base import memory
from distprune.shards.shard import _WORDS, at_position, checksums, replicas_agree
from helpers.sampling import num_examples

DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
)  # fmt: skip


def filled(shape, dtype, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50
    return values > 0 if dtype is torch.bool else values.to(dtype)


def checksum(tensor: torch.Tensor) -> int:
    return checksums([torch.ones(3), tensor, torch.ones(2)])[1]


def by_definition(tensor: torch.Tensor) -> int:
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 9), (3, 5, 11)])
def test_it_is_what_it_says(dtype, shape):
    tensor = filled(shape, dtype)
    assert checksum(tensor) == by_definition(tensor)
    with mock.patch("distprune.base.memory.takes_numpy", lambda device: False):
        assert checksum(tensor) == by_definition(tensor)


def test_several_blocks_and_odd_addresses():
    tensor = filled((5 * _WORDS + 77,), torch.float32)
    with mock.patch("distprune.shards.shard._DEVICE_BLOCKS", 2):
        for numpy in (True, False):
            with mock.patch.object(memory, "takes_numpy", lambda _, numpy=numpy: numpy):
                assert checksum(tensor) == by_definition(tensor)
                assert checksum(tensor[1:]) == by_definition(tensor[1:].clone())


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
