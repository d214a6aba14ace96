"""The order of channels, and where it is cut: beside a loop over all of them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distprune.base.amount import Bounds
from distprune.methods.channels import cut_channels, normalized
from helpers.sampling import num_examples


def slow_cut(scores, live, sizes, k, unit, bounds):
    """Channels that are dropped, one by one; None if the bounds forbid it."""
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    low, high = ([0] * len(sizes), list(sizes)) if bounds is None else bounds
    pruned = [
        sum(not n and g == group for n, g in zip(live, groups, strict=True))
        for group in range(len(sizes))
    ]
    rest = sorted((scores[c], c) for c in range(len(live)) if live[c])
    order = []
    for limits in (low, high):
        for _, c in rest:
            if c not in order and pruned[groups[c]] < limits[groups[c]]:
                pruned[groups[c]] += 1
                order.append(c)
        if limits is low:
            num_forced = len(order)
    cost = [n if unit == "elements" else 1 for n in live]
    if bounds is not None and not (
        sum(cost[c] for c in order[:num_forced]) <= k <= sum(cost[c] for c in order)
    ):
        return None
    dropped = set()
    for c in order:
        if sum(cost[d] for d in dropped) + cost[c] > k:
            break
        dropped.add(c)
    return dropped


@settings(max_examples=num_examples(400), deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    unit=st.sampled_from(["channels", "elements"]),
    is_bounded=st.booleans(),
    data=st.data(),
)
def test_the_cut_is_that_of_a_loop(sizes, unit, is_bounded, data):
    total = sum(sizes)
    scores = data.draw(st.lists(st.integers(0, 4), min_size=total, max_size=total))
    live = data.draw(st.lists(st.integers(0, 3), min_size=total, max_size=total))
    most = sum(live) if unit == "elements" else sum(map(bool, live))
    k = data.draw(st.integers(0, most))
    bounds = None
    if is_bounded:
        low = [data.draw(st.integers(0, size)) for size in sizes]
        high = [data.draw(st.integers(a, size)) for a, size in zip(low, sizes, strict=True)]
        bounds = (low, high)
    expected = slow_cut(scores, live, sizes, k, unit, bounds)
    arguments = (
        np.array(scores, dtype=np.float64), np.array(live, dtype=np.int64), sizes, k, unit,
        None if bounds is None else Bounds(tuple(bounds[0]), tuple(bounds[1])),
    )  # fmt: skip
    if expected is None:
        with pytest.raises(ValueError, match=f"{unit}.*min_sparsity.*max_sparsity"):
            cut_channels(*arguments)
        return
    cut = cut_channels(*arguments)
    assert set(np.flatnonzero(cut.dropped).tolist()) == expected
    if expected and bounds is None:
        top = max(scores[c] for c in expected)
        assert cut.threshold == top
        assert cut.num_ties == sum(s == top and n > 0 for s, n in zip(scores, live, strict=True))
        assert cut.num_ties_pruned == sum(scores[c] == top for c in expected)


@pytest.mark.parametrize("normalize", ["rms", "l2", "mean"])
def test_scores_are_divided_by_the_statistic_of_live_channels(normalize):
    scores = np.array([3.0, 100.0, 4.0, 0.0, 0.0, 1e300, 2e300])
    live = [np.array([True, False, True]), np.array([True, True]), np.array([True, True])]
    divided = normalized(scores, live, normalize)
    (a, b) = (25.0, 2) if normalize != "mean" else (7.0, 2)
    statistic = {"rms": math.sqrt(a / b), "l2": math.sqrt(a), "mean": a / b}[normalize]
    assert divided[[0, 2]].tolist() == [3.0 / statistic, 4.0 / statistic]
    assert divided[3:5].tolist() == [0.0, 0.0]  # nothing to divide by
    of_large = {"rms": math.sqrt(2.5), "l2": math.sqrt(5), "mean": 1.5}[normalize]
    assert divided[5:].tolist() == pytest.approx([1 / of_large, 2 / of_large], rel=1e-15)
    assert scores[0] == 3.0
