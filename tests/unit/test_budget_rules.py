"""Budgets against implementations that were written from the papers, and exact totals."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distprune import budgets
from distprune._common.amount import Bounded
from distprune.budgets.base import Line, NoLevelError, fill, rounded
from distprune.budgets.outliers import block_of
from helpers.sampling import num_examples

SHAPES = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple), min_size=1, max_size=7
)


def bounded(shapes, names=None):
    names = names or [f"layers.{i}.weight" for i in range(len(shapes))]
    return [
        Bounded(name, (name,), math.prod(shape), shape)
        for name, shape in zip(names, shapes, strict=True)
    ]


def exact_counts(budget, parameters, total):
    """The counts before they are rounded, without limits."""
    division = budget.divide(parameters)
    return fill(division.lines, [0] * len(parameters), division.caps, total)


# -- the engine of all linear rules ---------------------------------------------------------------


def held_at(level, lines, lowest, highest):
    return [
        min(max(line.start + line.slope * level, low), high)
        for line, low, high in zip(lines, lowest, highest, strict=True)
    ]


@settings(max_examples=num_examples(800), deadline=None, derandomize=True)
@given(data=st.data())
def test_counts_have_the_sum_and_lie_on_the_lines(data):
    size = data.draw(st.integers(1, 6))
    fractions = st.fractions(-20, 20, max_denominator=12)
    lines = [Line(data.draw(fractions), abs(data.draw(fractions))) for _ in range(size)]
    limits = [sorted((data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30)))) for _ in lines]
    lowest, highest = [low for low, _ in limits], [high for _, high in limits]
    total = data.draw(st.integers(sum(lowest), sum(highest)))
    # What the lines can give, by levels beyond every limit.
    ends = [sum(held_at(level, lines, lowest, highest)) for level in (-(10**9), 10**9)]
    try:
        counts = fill(lines, lowest, highest, total)
    except NoLevelError as error:
        assert not ends[0] <= total <= ends[1]
        assert [error.lowest, error.highest] == ends
        return
    assert sum(counts) == total
    # One level explains all counts that lie between their limits, and no count contradicts it.
    levels = {
        (count - line.start) / line.slope
        for count, line, low, high in zip(counts, lines, lowest, highest, strict=True)
        if line.slope and low < count < high
    }
    assert len(levels) <= 1
    for level in levels:
        assert counts == held_at(level, lines, lowest, highest)
    whole = rounded(counts, total)
    assert sum(whole) == total
    assert all(low <= n <= high for n, low, high in zip(whole, lowest, highest, strict=True))
    assert all(abs(n - count) < 1 for n, count in zip(whole, counts, strict=True))


def test_largest_remainders_are_rounded_up_and_equal_ones_in_order():
    thirds = [Fraction(4, 3), Fraction(5, 3), Fraction(4, 3), Fraction(5, 3)]
    assert rounded(thirds, 6) == [1, 2, 1, 2]
    assert rounded(thirds, 5) == [1, 2, 1, 1]
    assert rounded([Fraction(1, 2)] * 4, 2) == [1, 1, 0, 0]
    assert rounded([3, 0, 2], 5) == [3, 0, 2]


def test_what_does_not_fit_goes_to_the_others():
    lines = [Line(0, 10), Line(0, 10), Line(0, 20)]
    assert fill(lines, [0, 0, 0], [10, 10, 20], 20) == [5, 5, 10]
    assert fill(lines, [8, 0, 0], [10, 10, 20], 20) == [8, 4, 8]
    assert fill(lines, [8, 0, 0], [10, 1, 20], 20) == [8, 1, 11]
    assert fill(lines, [0, 0, 0], [10, 10, 20], 0) == [0, 0, 0]
    assert fill(lines, [0, 0, 0], [10, 10, 20], 40) == [10, 10, 20]
    assert fill([], [], [], 0) == []


def test_numbers_that_floats_cannot_hold():
    huge = 2**60 + 1
    counts = fill([Line(0, huge), Line(0, huge), Line(0, 1)], [0] * 3, [huge, huge, 1], huge)
    assert sum(rounded(counts, huge)) == huge


@pytest.mark.thorough
def test_thousands_of_parameters_take_little_time():
    shapes = [(64 + i % 7, 64 + i % 11) for i in range(5000)]
    parameters = bounded(shapes)
    total = sum(p.num_elements for p in parameters) // 2
    for budget in (budgets.Uniform(), budgets.ERK()):
        assert sum(exact_counts(budget, parameters, total)) == total


# -- each formula ---------------------------------------------------------------------------------


@settings(max_examples=num_examples(200), deadline=None, derandomize=True)
@given(shapes=SHAPES, share=st.fractions(0, 1, max_denominator=100))
def test_uniform_is_one_sparsity(shapes, share):
    parameters = bounded(shapes)
    size = sum(p.num_elements for p in parameters)
    total = round(share * size)
    counts = exact_counts(budgets.Uniform(), parameters, total)
    assert counts == [Fraction(total, size) * p.num_elements for p in parameters]


def rigl_erk(shapes, default_sparsity):
    """get_mask_init of google-research/rigl, sparse_utils.py: sparsities by the ERK method."""
    is_valid = False
    dense_layers: set[int] = set()
    while not is_valid:
        divisor = 0.0
        rhs = 0.0
        raw_probabilities = {}
        for i, shape in enumerate(shapes):
            n_param = np.prod(shape)
            n_zeros = n_param * default_sparsity
            if i in dense_layers:
                rhs -= n_zeros
            else:
                n_ones = n_param * (1 - default_sparsity)
                rhs += n_ones
                raw_probabilities[i] = np.sum(shape) / np.prod(shape)
                divisor += raw_probabilities[i] * n_param
        eps = rhs / divisor
        max_prob = np.max(list(raw_probabilities.values()))
        max_prob_one = max_prob * eps
        if max_prob_one > 1:
            for i, raw in raw_probabilities.items():
                if raw == max_prob:
                    dense_layers.add(i)
        else:
            is_valid = True
    return [
        0.0 if i in dense_layers else 1 - eps * raw_probabilities[i] for i in range(len(shapes))
    ]


@settings(max_examples=num_examples(200), deadline=None, derandomize=True)
@given(shapes=SHAPES, sparsity=st.integers(1, 99))
def test_erk_is_that_of_rigl(shapes, sparsity):
    parameters = bounded(shapes)
    size = sum(p.num_elements for p in parameters)
    total = round(Fraction(sparsity, 100) * size)
    counts = exact_counts(budgets.ERK(), parameters, total)
    expected = rigl_erk(shapes, total / size)
    for count, p, share in zip(counts, parameters, expected, strict=True):
        assert float(count) / p.num_elements == pytest.approx(share, abs=1e-9)


def test_erk_of_a_resnet():
    """Convolutions with kernels, a 1 x 1 convolution, a matrix, and a bias that stays dense."""
    shapes = [
        (64, 3, 7, 7),
        (64, 64, 3, 3),
        (512, 512, 3, 3),
        (512, 256, 1, 1),
        (1000, 512),
        (512,),
    ]
    parameters = bounded(shapes)
    size = sum(p.num_elements for p in parameters)
    counts = exact_counts(budgets.ERK(), parameters, size * 9 // 10)
    expected = rigl_erk(shapes, (size * 9 // 10) / size)
    shares = [float(c) / p.num_elements for c, p in zip(counts, parameters, strict=True)]
    assert shares == pytest.approx(expected, abs=1e-12)
    assert shares[-1] == 0.0 and shares[2] == max(shares)


def owl_of_the_authors(ratios, lam, sparsity):
    """prune_wanda_outlier of luuyin/OWL, lib/prune.py: the sparsity of each layer."""
    all_layer_ratio = np.array(ratios)
    low, high = all_layer_ratio.min(), all_layer_ratio.max()
    all_layer_ratio = (all_layer_ratio - low) * (1 / (high - low) * lam * 2)
    all_layer_ratio = all_layer_ratio - np.mean(all_layer_ratio) + (1 - sparsity)
    return 1 - all_layer_ratio


@settings(max_examples=num_examples(100), deadline=None, derandomize=True)
@given(
    ratios=st.lists(st.floats(0, 10), min_size=2, max_size=9),
    sparsity=st.integers(20, 80),
    lam=st.sampled_from([0.02, 0.08, 0.2]),
)
def test_owl_is_that_of_the_authors_for_layers_of_one_size(ratios, sparsity, lam):
    if max(ratios) - min(ratios) < 1e-3:
        return
    expected = owl_of_the_authors(ratios, lam, sparsity / 100)
    if expected.min() < 0 or expected.max() > 1:  # the authors do not clip
        return
    parameters = bounded([(10, 100)] * len(ratios))
    rule = budgets.OWL({f"layers.{i}.weight": ratio for i, ratio in enumerate(ratios)}, lam=lam)
    counts = exact_counts(rule, parameters, 1000 * len(ratios) * sparsity // 100)
    shares = [float(count) / 1000 for count in counts]
    assert shares == pytest.approx(expected, abs=1e-9)
    assert np.mean(shares) == pytest.approx(sparsity / 100, abs=1e-9)
    assert max(shares) - min(shares) == pytest.approx(2 * lam, abs=1e-9)


def test_owl_by_block():
    names = [f"model.layers.{i}.{part}.weight" for i in range(3) for part in ("q", "mlp.up")]
    names.append("lm_head.weight")
    parameters = bounded([(4, 4), (4, 12)] * 3 + [(8, 8)], names)
    own = dict(zip(names, [0.0, 4.0, 2.0, 2.0, 8.0, 0.0, 3.0], strict=True))
    total = sum(p.num_elements for p in parameters) // 2

    def densities(rule):
        counts = exact_counts(rule, parameters, total)
        return [1 - count / p.num_elements for count, p in zip(counts, parameters, strict=True)]

    shared = densities(budgets.OWL(own, lam=0.25))
    # Means by elements: 3, 2, 2 and 3 of the head.
    assert shared[0] == shared[1] == shared[6] == shared[2] + Fraction(1, 2)
    assert shared[2] == shared[3] == shared[4] == shared[5]
    alone = densities(budgets.OWL(own, lam=0.25, per="parameter"))
    assert alone[4] - alone[0] == Fraction(1, 2) and alone[0] == alone[5]
    blocks = {"model.layers.0": 3, "model.layers.1": 2, "model.layers.2": 2, "lm_head": 3}
    assert densities(budgets.OWL(blocks, lam=0.25)) == shared


def test_owl_without_differences_is_uniform():
    parameters = bounded([(3, 5), (7, 2), (4, 4)])
    rule = budgets.OWL({p.label: 1.5 for p in parameters})
    assert exact_counts(rule, parameters, 20) == exact_counts(budgets.Uniform(), parameters, 20)


def test_owl_takes_statistics():
    asked = []

    class Statistics:
        def outlier_ratios(self, *, threshold_multiple, per):
            asked.append((threshold_multiple, per))
            return {"layers.0.weight": 0.1, "layers.1.weight": 0.3}

    parameters = bounded([(10, 10)] * 2)
    rule = budgets.OWL(Statistics(), threshold_multiple=7)
    assert asked == [(7, "block")]
    assert exact_counts(rule, parameters, 140) == [78, 62]


@pytest.mark.parametrize(
    "name, block",
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3"),
        ("transformer.h.11.attn.c_attn.weight", "transformer.h.11"),
        ("0.weight", "0"),
        ("lm_head.weight", "lm_head.weight"),
        ("layer1.0.conv2.weight", "layer1.0"),
        ("Linear.weight (#3)", "Linear.weight (#3)"),
    ],
)
def test_blocks(name, block):
    assert block_of(name) == block


def test_uniform_plus():
    shapes = [(5,), (8, 3, 3, 3), (8, 8, 3, 3), (20, 30), (10, 20), (10,)]
    parameters = bounded(shapes)
    counts = exact_counts(budgets.UniformPlus(), parameters, 1300)
    assert counts[1] == 0 and counts[4] == 160  # at least 20 % of the last matrix stays
    assert counts[3] == 600 * (1300 - counts[4]) / Fraction(5 + 576 + 600 + 10)
