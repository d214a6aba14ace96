"""The arithmetic of radix selection, against a sort."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distprune.selection.radix import (
    ChangedError,
    Descent,
    RankOutsideError,
    descent_over,
    narrowed,
)


def histogram_of(keys, descent):
    inside = [key for key in keys if descent.low <= key <= descent.high]
    bins = [(key >> descent.shift) - (descent.low >> descent.shift) for key in inside]
    return np.bincount(np.array(bins, dtype=np.int64), minlength=descent.num_bins)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_finds_the_key_of_every_rank(data):
    bits = data.draw(st.integers(1, 11), "bits")
    edge = st.integers(-(2**62), 2**62) | st.integers(-40, 40)
    keys = data.draw(st.lists(edge, min_size=1, max_size=20), "keys")
    low = min(keys) - data.draw(st.integers(0, 1000), "below")
    high = max(keys) + data.draw(st.integers(0, 1000), "above")
    ordered = sorted(keys)
    rank = data.draw(st.integers(0, len(keys) - 1), "rank")
    descent = Descent.over(low, high, rank, bits)
    steps = 0
    while not descent.is_done:
        assert descent.num_bins <= 2**bits + 1
        histogram = histogram_of(keys, descent)
        descent, number = descent.narrowed(histogram)
        assert descent.low <= ordered[rank] <= descent.high
        assert histogram[number] == sum(descent.low <= key <= descent.high for key in keys)
        steps += 1
    assert descent.low == ordered[rank]
    assert descent.rank == rank - sum(key < ordered[rank] for key in keys)
    assert steps <= -(-(high - low).bit_length() // bits)


@pytest.mark.parametrize("rank", [-1, 3, 4])
def test_refuses_a_rank_that_the_histogram_does_not_hold(rank):
    descent = Descent.over(0, 7, rank, 3)
    with pytest.raises(RankOutsideError):
        descent.narrowed(np.array([1, 0, 0, 2, 0, 0, 0, 0]))


def test_scores_that_change_between_two_reads_are_an_error():
    descent = descent_over(0, 1 << 20, 3)
    histogram = torch.zeros(descent.num_bins, dtype=torch.int64)
    histogram[7] = 5
    descent, count = narrowed(descent, histogram)
    assert count == 5
    with pytest.raises(ChangedError):
        narrowed(descent, torch.zeros(descent.num_bins, dtype=torch.int64))
