from fractions import Fraction

import numpy as np
import pytest

from distprune._common.amount import checked_count, resolve_count, validate_amount


@pytest.mark.parametrize(
    "amount, size, count",
    [
        (0, 15, 0), (10, 15, 10), (1, 15, 1), (1.0, 15, 15), (0.4, 17, 7), (0.0, 0, 0),
        (0.5, 5, 2), (0.5, 7, 4), (0.5, 1, 0),  # halves to even
        (np.int64(3), 5, 3), (np.float32(0.5), 4, 2), (Fraction(1, 3), 9, 3),
    ],
)  # fmt: skip
def test_resolve_count(amount, size, count):
    validate_amount(amount)
    resolved = resolve_count(amount, size)
    assert resolved == count and type(resolved) is int


@pytest.mark.parametrize("amount", ["0.5", None, 1j, True, [1]])
def test_not_a_number(amount):
    with pytest.raises(TypeError, match="amount"):
        validate_amount(amount)


@pytest.mark.parametrize("amount", [-1, -0.1, 1.1, 20.0, float("nan"), float("inf")])
def test_out_of_range(amount):
    with pytest.raises(ValueError, match="amount"):
        validate_amount(amount)


def test_more_than_there_is():
    assert checked_count(5, 5) == 5
    with pytest.raises(ValueError, match="amount=6 is more than the 5"):
        checked_count(6, 5)
