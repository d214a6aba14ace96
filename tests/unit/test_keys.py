"""Keys are in the order of the scores; random keys are a function of seed and index."""

import pytest
import torch

from distprune.base.memory import hash_keys
from distprune.ranking.scores import RANDOM_KEYS, key_range, to_keys


@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("signed", [False, True])
def test_every_16_bit_float(dtype, signed, numpy, monkeypatch):
    """All 65536 of them: keys compare as the values do, and NaN are above everything."""
    monkeypatch.setattr("distprune.base.memory.takes_numpy", lambda device: numpy)
    scores = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    common = key_range(dtype, signed=signed)
    keys = to_keys(scores, common)[0].long()
    assert keys.min() >= common.low and keys.max() <= common.high
    assert torch.equal(keys == common.high, scores.isnan())
    values = scores.double()[~scores.isnan()]
    values = {
        False: values.abs(), True: values,
    }[signed]  # fmt: skip
    by_value = values.sort(stable=True)
    sorted_keys = keys[~scores.isnan()][by_value.indices]
    same_value = by_value.values[1:] == by_value.values[:-1]
    assert torch.equal(sorted_keys[1:] == sorted_keys[:-1], same_value)
    assert bool((sorted_keys[1:] >= sorted_keys[:-1]).all())


@pytest.mark.parametrize("flush", [False, True])
def test_denormals_are_distinct_even_when_they_are_flushed(flush):
    common = key_range(torch.float32)
    torch.set_flush_denormal(flush)
    try:
        scores = torch.tensor([1, 2, 3], dtype=torch.int32).view(torch.float32)
        assert to_keys(scores, common)[0].tolist() == [1, 2, 3]
    finally:
        torch.set_flush_denormal(False)


def test_dtypes_without_an_order_are_refused():
    for dtype in (torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(NotImplementedError, match=str(dtype)):
            key_range(dtype)


def splitmix64(index: int, seed: int) -> int:
    """In Python's integers, as published."""
    mask = 2**64 - 1
    x = (index * 0x9E3779B97F4A7C15 + seed) & mask
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & mask
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & mask
    x ^= x >> 31
    return min(x >> 1, RANDOM_KEYS.high)


@pytest.mark.parametrize("numpy", [True, False])
def test_random_keys_are_the_published_ones(numpy, monkeypatch):
    monkeypatch.setattr("distprune.base.memory.takes_numpy", lambda device: numpy)
    indices = torch.tensor([0, 1, 2, 12345, 2**31, 2**33 + 7, 2**40])
    for seed in (0, 1, 2**61 + 12345):
        expected = [splitmix64(index, seed) for index in indices.tolist()]
        assert hash_keys(indices, seed).tolist() == expected
