"""Exact sums: independent of the order, near the true sum, and equal on every device."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distprune.base import exact_sums
from distprune.base.memory import Scratch
from distprune.ranking.scores import Runs, ScaledScores, ScoreSource

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
        source = ScaledScores(ScoreSource(torch.from_numpy(scores)), scale)
        found = source.gather(Runs(0, len(scores), 1, torch.arange(len(scores))))
        assert np.array_equal(found.numpy(), expected) and found.dtype == torch_dtype
