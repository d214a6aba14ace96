"""Budgets: the level, the formulas of the papers, and calls with exact totals."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import distprune as prune
from distprune import budgets
from distprune.base.amount import Bounded
from distprune.budgets.base import Line, fill, rounded
from distprune.budgets.outliers import block_of
from distprune.schedule import Linear, ScheduledPruner
from helpers.models import Net
from helpers.models import fill as fill_model
from helpers.sampling import num_examples

NAMES = ["l1.weight", "l2.weight", "l3.weight"]  # 60, 50 and 15 elements


# -- the level


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
    if not ends[0] <= total <= ends[1]:
        with pytest.raises(ValueError, match=f"can divide {int(ends[0])} to {int(ends[1])} pruned"):
            fill(lines, lowest, highest, total)
        return
    counts = fill(lines, lowest, highest, total)
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


def test_numbers_that_floats_cannot_hold():
    huge = 2**60 + 1
    counts = fill([Line(0, huge), Line(0, huge), Line(0, 1)], [0] * 3, [huge, huge, 1], huge)
    assert sum(rounded(counts, huge)) == huge


# -- the formulas


SHAPES = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple), min_size=1, max_size=7
)


def bounded(shapes, names=None):
    names = names or [f"layers.{i}.weight" for i in range(len(shapes))]
    return [
        Bounded(name, (name,), math.prod(shape), shape)
        for name, shape in zip(names, shapes, strict=True)
    ]


def exact_shares(budget, parameters, sparsity):
    """The sparsities before counts are rounded, and the total's."""
    sizes = [parameter.num_elements for parameter in parameters]
    total = round(sparsity * sum(sizes))
    counts = fill(budget.lines(parameters), [0] * len(sizes), sizes, total)
    return [count / n for count, n in zip(counts, sizes, strict=True)], total / sum(sizes)


@settings(max_examples=num_examples(200), deadline=None, derandomize=True)
@given(shapes=SHAPES, sparsity=st.fractions(0, 1, max_denominator=100))
def test_uniform_is_one_sparsity(shapes, sparsity):
    shares, total = exact_shares(budgets.Uniform(), bounded(shapes), sparsity)
    assert set(map(float, shares)) == {total}


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
    shares, total = exact_shares(budgets.ERK(), bounded(shapes), Fraction(sparsity, 100))
    assert list(map(float, shares)) == pytest.approx(rigl_erk(shapes, total), abs=1e-9)


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
    parameters = bounded([(10, 100)] * len(ratios))
    rule = budgets.OWL({f"layers.{i}.weight": ratio for i, ratio in enumerate(ratios)}, lam=lam)
    shares, total = exact_shares(rule, parameters, Fraction(sparsity, 100))
    if max(ratios) == min(ratios):
        assert set(map(float, shares)) == {total}
    elif max(ratios) - min(ratios) > 1e-3:
        expected = owl_of_the_authors(ratios, lam, total)
        if expected.min() >= 0 and expected.max() <= 1:  # the authors do not clip
            assert list(map(float, shares)) == pytest.approx(expected, abs=1e-9)


def test_owl_by_block():
    names = [f"model.layers.{i}.{part}.weight" for i in range(3) for part in ("q", "mlp.up")]
    names.append("lm_head.weight")
    parameters = bounded([(4, 4), (4, 12)] * 3 + [(8, 8)], names)
    own = dict(zip(names, [0.0, 4.0, 2.0, 2.0, 8.0, 0.0, 3.0], strict=True))

    def densities(rule):
        return [1 - share for share in exact_shares(rule, parameters, 0.5)[0]]

    shared = densities(budgets.OWL(own, lam=0.25))
    # Means by elements: 3, 2, 2 and 3 of the head.
    assert shared[0] == shared[1] == shared[6] == shared[2] + Fraction(1, 2)
    assert shared[2] == shared[3] == shared[4] == shared[5]
    alone = densities(budgets.OWL(own, lam=0.25, per="parameter"))
    assert alone[4] - alone[0] == Fraction(1, 2) and alone[0] == alone[5]
    blocks = {"model.layers.0": 3, "model.layers.1": 2, "model.layers.2": 2, "lm_head": 3}
    assert densities(budgets.OWL(blocks, lam=0.25)) == shared


def test_owl_takes_statistics():
    class Statistics:
        def outlier_ratios(self, *, threshold_multiple, per):
            assert (threshold_multiple, per) == (7, "block")
            return {"layers.0.weight": 0.1, "layers.1.weight": 0.3}

    rule = budgets.OWL(Statistics(), threshold_multiple=7)
    shares, _ = exact_shares(rule, bounded([(10, 10)] * 2), 0.7)
    assert shares == [Fraction(39, 50), Fraction(31, 50)]


@pytest.mark.parametrize(
    "name, block",
    [
        ("transformer.h.11.attn.c_attn.weight", "transformer.h.11"),
        ("0.weight", "0"),
        ("lm_head.weight", "lm_head.weight"),
        ("layer1.0.conv2.weight", "layer1.0"),
        ("Linear.weight (#3)", "Linear.weight (#3)"),
    ],
)
def test_blocks(name, block):
    assert block_of(name) == block


# -- calls


def pruned(budget, amount=None, model=None, **options):
    model = model or fill_model(Net(), "normal", "float32")
    report = prune.global_unstructured(
        prune.select(model), prune.L1Unstructured, amount=amount, budget=budget, **options
    )
    return model, report, [entry.num_pruned for entry in report.parameters]


def assert_lowest_are_pruned(model, counts):
    for name, count in zip(NAMES, counts, strict=True):
        layer = getattr(model, name[:2])
        order = torch.argsort(layer.weight_orig.detach().abs().flatten(), stable=True)
        keep = torch.ones(order.numel())
        keep[order[:count]] = 0
        assert torch.equal(layer.weight_mask.flatten(), keep)


@pytest.mark.parametrize("amount", [0, 1, 62, 125, 0.5])
@pytest.mark.parametrize("budget", ["uniform", "erk", budgets.Uniform(), budgets.ERK()])
def test_exact_totals_and_lowest_elements(budget, amount):
    model, report, counts = pruned(budget, amount)
    assert sum(counts) == (amount if isinstance(amount, int) else round(amount * 125))
    assert_lowest_are_pruned(model, counts)
    assert report.threshold is None


def test_limits_and_what_is_pruned_already_count():
    model, _, _ = pruned({"l1.weight": 0.5, "l2.weight": 0.0, "l3.weight": 0})
    _, report, counts = pruned("uniform", 20, model, max_sparsity={"l2.weight": 0.2})
    assert counts == [32, 10, 8] and report.num_pruned_now == 20
    assert [entry.wanted for entry in report.parameters] == [0.4, 0.4, 0.4]
    assert [entry.held_at for entry in report.parameters] == [None, "max_sparsity", None]
    row = ["l2.weight", "50", "0", "10", "40.00%", "20.00%", "max_sparsity"]
    assert str(report).splitlines()[3].split() == row
    # 31.25: 15, 12.5 and 3.75 of them; the largest remainder is that of l3.
    assert pruned("uniform", 31)[2] == [15, 12, 4]
    assert pruned("uniform", 50, min_sparsity={"l3.weight": 0.8})[2][2] == 12
    with pytest.raises(ValueError, match="leaves 37 elements that may be pruned"):
        pruned("uniform", 50, max_sparsity=0.3)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_mapping_gives_the_total(by_name):
    model = fill_model(Net(), "normal", "float32")
    shares = {"l1.weight": 0.05, "l2.weight": 0.5, "l3.weight": Fraction(1, 3)}
    if not by_name:
        shares = {(getattr(model, name[:2]), "weight"): share for name, share in shares.items()}
    model, report, counts = pruned(shares, model=model)
    assert counts == [3, 25, 5] and report.amount is None
    assert_lowest_are_pruned(model, counts)
    # Pruned to these sparsities: nothing is left to do; nor is anything undone.
    assert pruned(shares, model=model)[1].num_pruned_now == 0
    assert pruned(dict.fromkeys(shares, 0.1), model=model)[2] == [6, 25, 5]


def test_a_mapping_and_an_amount_have_to_agree():
    shares = {"l1.weight": 0.05, "l2.weight": 0.5, "l3.weight": 0.25}  # 3, 25 and 3.75
    assert pruned(shares)[2] == [3, 25, 4]
    assert pruned(shares, 32)[2] == [3, 25, 4]
    assert pruned(shares, 31)[2] == [3, 25, 3]
    with pytest.raises(ValueError, match="budget= for 31 to 32; expected the same"):
        pruned(shares, 33)
    relative = budgets.Sparsities(shares, relative=True)
    assert pruned(relative, 63)[2] == [6, 50, 7]  # 6, 50 and 7.5, but the total is 63
    assert pruned(relative, 90)[2] == [25, 50, 15]  # l2 is full, and l3: the rest is of l1
    some = budgets.Sparsities({**shares, "l1.weight": 0}, relative=True)
    with pytest.raises(ValueError, match="can divide 0 to 65 pruned elements"):
        pruned(some, 66)
    with pytest.raises(TypeError, match="amount"):
        pruned(relative)


@pytest.mark.parametrize(
    ("budget", "error", "text"),
    [
        ({"l1.weight": 0.5, "l2.weight": 0.5}, ValueError, "does not have l3.weight"),
        ({**dict.fromkeys(NAMES, 0.5), "l9": 0.1}, ValueError, "'l9', which is none"),
        (dict.fromkeys(NAMES, 1.5), ValueError, r"budget\[l1.weight\]=1.5 is not in \[0, 1\]"),
        (dict.fromkeys(NAMES, "0.5"), TypeError, "'0.5'"),
        ("owl", ValueError, r"expected one of 'uniform', 'erk', .*budgets.OWL\(ratios\)"),
        (budgets.ERK, TypeError, r"such as budgets.ERK\(\)"),
        (budgets.OWL({"l1.weight": 1.0}), ValueError, "no outlier ratio for l2.weight"),
    ],
)  # fmt: skip
def test_refused(budget, error, text):
    model = fill_model(Net(), "normal", "float32")
    with pytest.raises(error, match=text):
        pruned(budget, 50, model)
    assert not prune.is_pruned(model)


@pytest.mark.parametrize(
    ("ratios", "lam", "error", "text"),
    [
        (0.5, 0.1, TypeError, "ratios is a float"),
        ({"a": -1.0}, 0.1, ValueError, "'a' is -1.0; expected one >= 0"),
        ({"a": math.inf}, 0.1, ValueError, "finite"),
        ({"a": True}, 0.1, TypeError, "bool"),
        ({"a": 1.0}, 0.6, ValueError, "lam=0.6"),
    ],
)
def test_refused_by_owl(ratios, lam, error, text):
    with pytest.raises(error, match=text):
        budgets.OWL(ratios, lam=lam)


def test_tied_parameters_are_one():
    model = nn.ModuleDict({"a": nn.Linear(6, 10), "b": nn.Linear(6, 10), "c": nn.Linear(10, 4)})
    model["b"].weight = model["a"].weight
    targets = prune.select(model)
    # Also under the name under which the pair is not listed.
    for pair in ("a.weight", (model["b"], "weight")):
        shares = {pair: 0.5, (model["c"], "weight"): 0.25}
        report = prune.global_unstructured(targets, prune.L1Unstructured, budget=shares)
        assert [entry.num_pruned for entry in report.parameters] == [30, 10]


class Halves(budgets.Budget):
    """A budget of a user: the first parameter gets half of all."""

    def lines(self, parameters):
        sizes = [each.num_elements for each in parameters]
        return [Line(0, sum(sizes[1:])), *(Line(0, n) for n in sizes[1:])]


def test_a_budget_of_a_user():
    assert repr(Halves()) == "Halves()"
    assert pruned(Halves(), 40)[2] == [20, 15, 5]


def steps(budget, **options):
    """Per step of a schedule, the counts of all parameters."""
    pruner = ScheduledPruner(
        prune.select(fill_model(Net(), "normal", "float32")),
        Linear(begin=0, end=3, frequency=1, final_sparsity=0.6),
        budget=budget,
        **options,
    )
    reports = [report for report in (pruner.step() for _ in range(4)) if report is not None]
    return [[entry.num_pruned for entry in report.parameters] for report in reports]


def test_a_schedule_divides_every_target():
    assert steps("uniform") == [[12, 10, 3], [24, 20, 6], [36, 30, 9]]
    # Ratios 1 : 2 : 0; l2 is full at the last step.
    ratios = {"l1.weight": 0.45, "l2.weight": 0.9, "l3.weight": 0.0}
    assert steps(ratios) == [[9, 16, 0], [19, 31, 0], [28, 47, 0]]
    assert steps(budgets.Sparsities(ratios))[-1] == [28, 47, 0]
    with pytest.raises(ValueError, match="does not have l2"):
        steps({"l1.weight": 1.0})


def test_a_schedule_with_floors_and_a_budget():
    """While the target is below the sum of the floors, no count goes beyond its floor."""
    rows = steps("uniform", min_sparsity={"l3.weight": 1.0, "l2.weight": 0.5})
    assert [sum(row) for row in rows] == [25, 50, 75]
    assert all(n <= floor for n, floor in zip(rows[0], (0, 25, 15), strict=True))
    assert rows[1] == [10, 25, 15] and rows[2] == [33, 27, 15]
