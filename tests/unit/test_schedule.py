"""Schedules as functions of the step."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distprune import schedule
from helpers.sampling import num_examples

STEPS = st.integers(0, 60)
SPARSITY = st.floats(0, 1)


def due_steps(what, upto=200):
    return [step for step in range(upto) if what.is_due(step)]


def test_one_shot():
    once = schedule.OneShot(step=3, sparsity=0.5)
    assert due_steps(once) == [3]
    assert [once.sparsity_at(step) for step in (0, 2, 3, 100)] == [0.0, 0.0, 0.5, 0.5]


def test_linear_and_cubic():
    linear = schedule.Linear(10, 50, 10, 0.8, initial_sparsity=0.4)
    cubic = schedule.Cubic(10, 50, 10, 0.8, initial_sparsity=0.4)
    assert due_steps(linear) == due_steps(cubic) == [10, 20, 30, 40, 50]
    for s, (i, step) in itertools.product((linear, cubic), enumerate((10, 20, 30, 40, 50))):
        power = 1 if s is linear else 3
        exact = Fraction(8, 10) - Fraction(4, 10) * Fraction(4 - i, 4) ** power
        assert s.sparsity_at(step) == pytest.approx(float(exact), abs=1e-15)
    assert linear.sparsity_at(9) == cubic.sparsity_at(9) == 0.0
    assert linear.sparsity_at(29) == linear.sparsity_at(20)  # holds until the next due step


@pytest.mark.parametrize(
    ("begin", "end", "frequency", "due"),
    [
        (0, 10, 4, [0, 4, 8, 10]),  # the end is due whether or not it is a multiple
        (5, 5, 3, [5]),
        (2, 6, 100, [2, 6]),
        (0, 0, 1, [0]),
    ],
)
def test_due_steps(begin, end, frequency, due):
    for kind in (schedule.Linear, schedule.Cubic):
        ramp = kind(begin, end, frequency, 0.7)
        assert due_steps(ramp) == due
        assert ramp.sparsity_at(end) == ramp.sparsity_at(end + 5) == 0.7
    function = schedule.Function(lambda step: 0.1, frequency, begin, end)
    assert due_steps(function) == due


@settings(max_examples=num_examples(300), deadline=None, derandomize=True)
@given(STEPS, STEPS, st.integers(1, 70), SPARSITY, SPARSITY)
def test_ramps_never_decrease_and_meet_both_ends(begin, length, frequency, one, other):
    low, high = sorted((one, other))
    for kind in (schedule.Linear, schedule.Cubic):
        ramp = kind(begin, begin + length, frequency, high, low)
        values = [ramp.sparsity_at(step) for step in range(begin + length + 3)]
        assert values == sorted(values)
        assert values[-1] == values[begin + length] == high
        assert values[begin] == (low if length else high)
        changes = [t for t, (a, b) in enumerate(itertools.pairwise(values), 1) if a != b]
        assert all(ramp.is_due(step) for step in changes)


def test_function():
    seen = []

    def fn(step):
        seen.append(step)
        return np.float32(0.25)

    function = schedule.Function(fn, frequency=5, begin=10)
    assert due_steps(function, 30) == [10, 15, 20, 25]
    assert function.sparsity_at(9) == 0.0 and seen == []
    assert function.sparsity_at(17) == 0.25 and seen == [15]
    bounded = schedule.Function(fn, frequency=5, begin=10, end=12)
    assert bounded.sparsity_at(1000) == 0.25 and seen[-1] == 12


@pytest.mark.parametrize(
    ("value", "error"),
    [(math.nan, ValueError), (1.5, ValueError), (-0.1, ValueError), ("0.5", TypeError),
     (None, TypeError), (True, TypeError), (torch.tensor(0.5), TypeError)],
)  # fmt: skip
def test_a_function_that_returns_no_sparsity(value, error):
    with pytest.raises(error, match=r"fn\(4\)"):
        schedule.Function(lambda step: value).sparsity_at(4)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: schedule.OneShot(-1, 0.5), ValueError, "step=-1"),
        (lambda: schedule.OneShot(1.0, 0.5), TypeError, "step=1.0"),
        (lambda: schedule.OneShot(1, math.nan), ValueError, "sparsity=nan"),
        (lambda: schedule.OneShot(1, 2), ValueError, "sparsity=2"),
        (lambda: schedule.Linear(5, 4, 1, 0.5), ValueError, "end=4 comes before begin=5"),
        (lambda: schedule.Linear(0, 4, 0, 0.5), ValueError, "frequency=0"),
        (lambda: schedule.Cubic(0, 4, True, 0.5), TypeError, "frequency=True"),
        (lambda: schedule.Cubic(0, 4, 1, 0.5, 0.6), ValueError, "initial_sparsity=0.6 is above"),
        (lambda: schedule.Cubic(0, 4, 1, "0.5"), TypeError, "final_sparsity='0.5'"),
        (lambda: schedule.Function(0.5), TypeError, "fn=0.5"),
        (lambda: schedule.Function(abs, frequency=0), ValueError, "frequency=0"),
        (lambda: schedule.Function(abs, begin=3, end=2), ValueError, "end=2"),
    ],
)
def test_bad_arguments(make, error, text):
    with pytest.raises(error, match=text):
        make()


def some_function(step):
    return step / 100


def test_schedules_are_values():
    cubic = schedule.Cubic(0, 10, 2, 0.8)
    assert cubic == schedule.Cubic(0, 10, 2, 0.8) != schedule.Linear(0, 10, 2, 0.8)
    assert len({cubic, schedule.Cubic(0, 10, 2, 0.8)}) == 1
    assert eval(repr(cubic), vars(schedule)) == cubic
    with pytest.raises(AttributeError):
        cubic.begin = 3
    with_numpy = schedule.Cubic(np.int64(0), np.int32(10), 2, np.float64(0.8), 0)
    assert repr(with_numpy) == repr(cubic) and with_numpy == cubic
    function = schedule.Function(some_function, 3)
    assert repr(function) == "Function(fn=some_function, frequency=3, begin=0, end=None)"
    assert function == schedule.Function(some_function, 3)
