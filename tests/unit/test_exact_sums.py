"""Exact sums: independent of the order, near the true sum, and equal on every device."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distprune.base import exact_sums
from distprune.base.memory import Scratch
from distprune.methods.channels import joint_norms
from distprune.ranking.scores import Runs, ScaledScores, ScoreSource
from distprune.ranks.collectives import Communicator
from distprune.shards.geometry import dim_coordinates
from helpers.sampling import num_examples
from helpers.virtual_ranks import run_virtual_ranks

NUMBERS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50)


def on_grid(scores, power, exponent):
    """The definition, in rational numbers: every term rounded to 2**-36 of 2**(power*exponent)."""
    unit = Fraction(2) ** (power * exponent - 36)
    return sum(round(abs(Fraction(float(score))) ** power / unit) for score in scores)


@given(NUMBERS, st.sampled_from([1, 2]), st.randoms())
def test_a_sum_is_that_of_the_definition_in_any_order_and_any_parts(numbers, power, random):
    scores = np.array(numbers, dtype=np.float32)
    exponent = exact_sums.exponent_of(float(abs(scores).max()))
    expected = on_grid(scores, power, exponent)
    scores = abs(scores)
    assert exact_sums.grid_sum(scores, exponent, power, Scratch()) == expected
    random.shuffle(numbers)
    cut = random.randrange(len(numbers) + 1)
    parts = [numbers[:cut], numbers[cut:]]
    sums = [
        exact_sums.grid_sum(abs(np.array(part, dtype=np.float32)), exponent, power, Scratch())
        for part in parts
    ]
    assert sum(sums) == expected
    on_device = exact_sums.grid_sum_on_device(torch.from_numpy(scores), exponent, power)
    assert int(on_device) == expected


@pytest.mark.parametrize("magnitude", [1e-270, 1e-160, 1e160, 1e270])
def test_float64_scores_of_any_size_have_a_sum(magnitude):
    scores = np.array([1.0, -2.0, 3.0]) * magnitude
    exponent = exact_sums.exponent_of(float(abs(scores).max()))
    total = exact_sums.grid_sum(scores, exponent, 2, Scratch())
    assert int(exact_sums.grid_sum_on_device(torch.from_numpy(scores), exponent, 2)) == total
    statistic = exact_sums.statistic("l2", total, exponent, 3)
    assert statistic == pytest.approx(math.sqrt(14) * magnitude, rel=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("exponent", [-160, -128, -1, 0, 126, 127, 148])
def test_scores_are_multiplied_by_a_scale_of_any_exponent(dtype, exponent):
    torch_dtype = torch.from_numpy(np.zeros(0, dtype)).dtype
    for divisor in (3.0, 1.0 + 2**-30, 1.75):
        divisor = math.ldexp(divisor, exponent)
        scale = exact_sums.scale_of(divisor, torch_dtype)
        assert scale == math.ldexp(
            float(dtype(1 / math.ldexp(divisor, -exponent))), -exponent
        )  # that of an ordinary divisor, times a power of two
        largest = max(-149, min(exponent, 103))
        scores = np.ldexp(np.arange(1, 2**24, 99991), largest).astype(dtype)
        product = [Fraction(float(score)) * Fraction(scale) for score in scores]
        expected = np.array([float(each) for each in product]).astype(dtype)
        assert np.array_equal(exact_sums.scale_scores(scores, scale, scores.copy()), expected)
        source = ScaledScores(ScoreSource(torch.from_numpy(scores)), divisor)
        found = source.gather(Runs(0, len(scores), 1, torch.arange(len(scores))))
        assert np.array_equal(found.numpy(), expected) and found.dtype == torch_dtype


# Channel norms: exact sums, the same bits on any sharding.


NORMS = (1, 2, math.inf)


def channel_norms(rows, n, channel_of_row, num_channels, channel_size, communicator):
    sizes = torch.full((num_channels,), channel_size)
    return joint_norms([lambda: (rows, channel_of_row, None)], n, sizes, communicator)


def norms_over(values, dim, n, split_dim, size):
    def on_rank(communicator):
        coordinates = dim_coordinates(values.shape, [(split_dim, size, communicator.index)])
        held = [torch.arange(rows.start, rows.stop) for rows in coordinates]
        part = values.index_select(split_dim, held[split_dim])
        channels = values.shape[dim]
        rows, channel_of_row = part.movedim(dim, 0), held[dim]
        if communicator.index % 2:  # every element as a row, as FSDP1's runs have it
            elements = rows.flatten(1)
            channel_of_row = channel_of_row.repeat_interleave(elements.shape[1])
            rows = elements.reshape(-1, 1)
        return channel_norms(
            rows, float(n), channel_of_row, channels, values.numel() // channels, communicator
        )

    return run_virtual_ranks(on_rank, size)


@settings(max_examples=num_examples(150), deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=4).map(tuple),
    n=st.sampled_from(NORMS),
    size=st.integers(2, 5),
    scale=st.sampled_from([1.0, 1e-30, 1e30]),
    data=st.data(),
)
def test_any_sharding_gives_the_same_bits(shape, n, size, scale, data):
    dim, split_dim = (data.draw(st.integers(0, len(shape) - 1)) for _ in range(2))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randn(shape, generator=generator) * scale
    values[torch.rand(shape, generator=generator) < 0.2] = 0
    (whole,) = norms_over(values, dim, n, 0, 1)
    for norms in norms_over(values, dim, n, split_dim, size):
        assert torch.equal(norms, whole)
    by_torch = torch.norm(
        values.double(), p=n, dim=[other for other in range(len(shape)) if other != dim]
    )
    torch.testing.assert_close(whole, by_torch, rtol=1e-12, atol=0.0)


def test_equal_channels_have_equal_norms_whatever_the_order_of_their_elements():
    row = torch.tensor([0.1, 0.7, 1e-3, 3.3, 0.1, 9.9])
    values = torch.stack([row, row.flip(0), row[torch.randperm(6)]])
    norms = channel_norms(values, 1.0, torch.arange(3), 3, 6, Communicator(()))
    assert norms[0] == norms[1] == norms[2]


def test_channels_of_very_different_size_keep_their_precision():
    values = torch.tensor([[1e30, 1e30], [3e-20, 4e-20], [3e-20, 4.0001e-20]])
    norms = channel_norms(values, 2.0, torch.arange(3), 3, 2, Communicator(()))
    assert norms[0] > norms[2] > norms[1]
    assert norms[1].item() == pytest.approx(5e-20, rel=1e-7)


def test_infinities_and_nan():
    values = torch.tensor([[1.0, math.inf], [1.0, 2.0], [math.nan, 1.0], [math.nan, math.inf]])
    for n in (1.0, 2.0, math.inf):
        norms = channel_norms(values, n, torch.arange(4), 4, 2, Communicator(()))
        assert norms[0] == math.inf and norms[1].isfinite()
        assert norms[2].isnan() and norms[3].isnan()


@pytest.mark.parametrize("n", NORMS)
@pytest.mark.parametrize("split_dim", [0, 1])
def test_a_nan_of_one_rank_is_one_of_the_channel(n, split_dim):
    values = torch.ones(4, 6)
    values[1, 0] = values[2, 5] = torch.nan
    for norms in norms_over(values, 0, n, split_dim, 3):
        assert norms.isnan().tolist() == [False, True, True, False]
