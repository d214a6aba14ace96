"""Counts and sums of squares in windows of keys, against a loop over all elements."""

from fractions import Fraction
from unittest import mock

import pytest
import torch

from distprune._common import memory
from distprune.budgets.magnitudes import (
    NUM_DIGITS,
    Counter,
    Window,
    as_float,
    squares_of,
    sum_from_digits,
)
from distprune.selection.keys import Order, key_range, to_keys
from helpers.virtual_shards import candidates

EXPONENT = 10  # all values are below 2**10


def by_loop(values, keys, window):
    """The rest, the bins, and the sum of the squares above the window, one element at a time."""
    rest, bins, total = 0, [0] * window.num_bins, Fraction(0)
    for value, key in zip(values, keys, strict=True):
        if key < window.low:
            rest += 1
        elif key <= window.high:
            bins[(key >> window.shift) - (window.low >> window.shift)] += 1
        elif key <= window.top:
            total += Fraction(value) ** 2 / 4**EXPONENT
    return ([rest] if window.has_rest else []) + bins, total


@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_windows_inside_windows(dtype, store, numpy):
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randint(-1000, 1001, (40, 30), generator=generator).to(dtype)
    live = torch.rand(40, 30, generator=generator) > 0.2
    common = key_range(dtype, Order.MAGNITUDE)
    values = tensor[live].double().abs().tolist()
    keys = to_keys(tensor[live], common).tolist()
    ordered = sorted(keys)
    largest = ordered[-1]
    bits = (largest - ordered[100]).bit_length()
    first = Window(ordered[100], largest, max(0, bits - 6), largest, True, EXPONENT)
    second = Window(ordered[300], ordered[700], max(0, bits - 9), largest, False, EXPONENT)
    third = Window(ordered[400], ordered[500], max(0, bits - 12), ordered[700], False, EXPONENT)
    part, _ = candidates(tensor, live, "rows", common, 1, 0)
    counter = Counter([part], common)
    with mock.patch.object(memory, "takes_numpy", lambda device: numpy):
        assert counter.largest().tolist() == [largest]
        for window in (first, second, third):
            row = counter.count({0: window}, store=store).tolist()
            counts, total = by_loop(values, keys, window)
            assert row[:-NUM_DIGITS] == counts
            # Squares of integers below 2**10 need no more than the three digits.
            assert Fraction(sum_from_digits(row[-NUM_DIGITS:]), 2**93) == total
            assert as_float(sum_from_digits(row[-NUM_DIGITS:])) == float(total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("exponent", [-20, 0, 9])
def test_squares_are_rounded_once(dtype, exponent):
    generator = torch.Generator().manual_seed(1)
    numbers = (torch.randn(200, generator=generator) * 2.0 ** min(exponent, 5)).to(dtype)
    common = key_range(dtype, Order.MAGNITUDE)
    expected = [
        float(Fraction(value) ** 2 / Fraction(4) ** exponent) for value in numbers.double().tolist()
    ]
    assert squares_of(to_keys(numbers, common).numpy(), common, exponent).tolist() == expected
