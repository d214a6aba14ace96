"""Budgets: the level, the formulas of the papers, and calls with exact totals."""

import functools
import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import distprune as prune
from distprune import budgets
from distprune.base.amount import Bounded, to_bounds
from distprune.budgets import divided, lines_of, owl_lines
from distprune.schedule import Linear, ScheduledPruner
from helpers import reference
from helpers.models import HARD, Net, seeded, values
from helpers.sampling import num_examples

NAMES = ["l1.weight", "l2.weight", "l3.weight"]  # 60, 50 and 15 elements


# -- the level


def held_at(level, lines, lowest, highest):
    return [
        min(max(start + slope * level, low), high)
        for (start, slope), low, high in zip(lines, lowest, highest, strict=True)
    ]


@settings(max_examples=num_examples(800), deadline=None, derandomize=True)
@given(data=st.data())
def test_counts_have_the_sum_and_lie_on_the_lines(data):
    size = data.draw(st.integers(1, 6))
    fractions = st.fractions(-20, 20, max_denominator=12)
    lines = [(data.draw(fractions), abs(data.draw(fractions))) for _ in range(size)]
    limits = [sorted((data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30)))) for _ in lines]
    lowest, highest = [low for low, _ in limits], [high for _, high in limits]
    total = data.draw(st.integers(sum(lowest), sum(highest)))
    # What the lines can give, by levels beyond every limit.
    ends = [sum(held_at(level, lines, lowest, highest)) for level in (-(10**9), 10**9)]
    if not ends[0] <= total <= ends[1]:
        with pytest.raises(ValueError, match=f"can divide {int(ends[0])} to {int(ends[1])} pruned"):
            divided(lines, lowest, highest, total)
        return
    counts = divided(lines, lowest, highest, total)
    assert sum(counts) == total
    assert all(low <= n <= high for n, low, high in zip(counts, lowest, highest, strict=True))
    # At one level no count is a whole element away from its line, held between the limits.
    above, below = [Fraction(-(10**9))], [Fraction(10**9)]
    for n, (start, slope), low, high in zip(counts, lines, lowest, highest, strict=True):
        if not slope:
            assert abs(min(max(start, low), high) - n) < 1
            continue
        if low < n:
            above.append((n - 1 - start) / slope)
        if n < high:
            below.append((n + 1 - start) / slope)
    assert max(above) < min(below)


def test_largest_remainders_are_rounded_up_and_equal_ones_in_order():
    lines = [(0, 4), (0, 5), (0, 4), (0, 5)]
    assert divided(lines, [0] * 4, [9] * 4, 6) == [1, 2, 1, 2]  # 4/3 and 5/3
    assert divided(lines, [0] * 4, [9] * 4, 5) == [1, 2, 1, 1]  # 10/9 and 25/18


def test_numbers_that_floats_cannot_hold():
    huge = 2**60 + 1
    lines = [(0, huge), (0, huge), (0, 1)]
    assert sum(divided(lines, [0] * 3, [huge, huge, 1], huge)) == huge


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


def exact_shares(lines, parameters, sparsity):
    """The sparsities before counts are rounded, to 1e-12, and the total's."""
    sizes = [parameter.num_elements for parameter in parameters]
    total, unit = round(sparsity * sum(sizes)), 10**12
    finer = [(start * unit, slope * unit) for start, slope in lines]
    counts = divided(finer, [0] * len(sizes), [n * unit for n in sizes], total * unit)
    shares = [count / (n * unit) for count, n in zip(counts, sizes, strict=True)]
    return shares, total / sum(sizes)


@settings(max_examples=num_examples(200), deadline=None, derandomize=True)
@given(shapes=SHAPES, sparsity=st.fractions(0, 1, max_denominator=100))
def test_uniform_is_one_sparsity(shapes, sparsity):
    parameters = bounded(shapes)
    shares, total = exact_shares(lines_of("uniform", parameters), parameters, sparsity)
    assert shares == pytest.approx([total] * len(shares), abs=1e-9)


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
    lines = lines_of("erk", parameters)
    shares, total = exact_shares(lines, parameters, Fraction(sparsity, 100))
    assert shares == pytest.approx(rigl_erk(shapes, total), abs=1e-9)


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
    exact = [Fraction(repr(ratio)) for ratio in ratios]
    lines = owl_lines([1000] * len(ratios), exact, Fraction(repr(lam)))
    shares, total = exact_shares(lines, parameters, Fraction(sparsity, 100))
    if max(ratios) == min(ratios):
        assert shares == pytest.approx([total] * len(shares), abs=1e-9)
    elif max(ratios) - min(ratios) > 1e-3:
        expected = owl_of_the_authors(ratios, lam, total)
        if expected.min() >= 0 and expected.max() <= 1:  # the authors do not clip
            assert shares == pytest.approx(expected, abs=1e-9)


def test_owl_by_block():
    shapes = {
        f"model.layers.{i}.{part}": (4, n) for i in range(3) for part, n in (("q", 40), ("up", 120))
    }
    shapes["lm_head.weight"] = (8, 80)
    own = dict(zip(shapes, [0.0, 4.0, 2.0, 2.0, 8.0, 0.0, 3.0], strict=True))

    def densities(ratios):
        return [1 - share for share in budgets.owl(shapes, 0.5, ratios, lam=0.25).values()]

    alone = densities(own)
    assert alone[4] - alone[0] == Fraction(1, 2) and alone[0] == alone[5]
    shared = densities(
        {"model.layers.0": 3, "model.layers.1": 2, "model.layers.2": 2, "lm_head": 3}
    )
    assert shared[0] == shared[1] == shared[6] == shared[2] + Fraction(1, 2)
    assert shared[2] == shared[3] == shared[4] == shared[5]


# -- calls


def pruned(amount, model=None, **options):
    model = model or seeded(Net())
    amount = amount(prune.select(model)) if callable(amount) else amount
    report = prune.global_unstructured(
        prune.select(model), prune.L1Unstructured, amount=amount, **options
    )
    return model, report, [entry.num_pruned for entry in report.parameters]


def assert_lowest_are_pruned(model, counts):
    for name, count in zip(NAMES, counts, strict=True):
        layer = getattr(model, name[:2])
        order = torch.argsort(layer.weight_orig.detach().abs().flatten(), stable=True)
        keep = torch.ones(order.numel())
        keep[order[:count]] = 0
        assert torch.equal(layer.weight_mask.flatten(), keep)


@pytest.mark.parametrize("count", [0, 1, 62, 125])
@pytest.mark.parametrize("budget", [budgets.uniform, budgets.erk])
def test_exact_totals_and_lowest_elements(budget, count):
    model, report, counts = pruned(lambda pairs: budget(pairs, Fraction(count, 125)))
    assert sum(counts) == count and report.amount is report.threshold is None
    assert_lowest_are_pruned(model, counts)


def test_budgets_take_bounds():
    def counts(sparsity, **bounds):
        return pruned(lambda pairs: budgets.uniform(pairs, sparsity, **bounds))[2]

    # 31 of 125: 14.88, 12.4 and 3.72 of them; the largest remainders are those of l1 and l3.
    assert counts(Fraction(31, 125)) == [15, 12, 4]
    assert counts(0.4, max_sparsity={"l2.weight": 0.2}) == [32, 10, 8]
    assert counts(0.4, min_sparsity={"l3.weight": 0.8})[2] == 12
    with pytest.raises(ValueError, match="can divide 0 to 37 pruned elements"):
        counts(0.4, max_sparsity=0.3)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_mapping_gives_the_total(by_name):
    model = seeded(Net())
    shares = {"l1.weight": 0.05, "l2.weight": 0.5, "l3.weight": Fraction(1, 3)}
    if not by_name:
        shares = {(getattr(model, name[:2]), "weight"): share for name, share in shares.items()}
    model, report, counts = pruned(shares, model)
    assert counts == [3, 25, 5]
    assert [entry.wanted for entry in report.parameters] == [0.05, 0.5, 1 / 3]
    assert_lowest_are_pruned(model, counts)
    # Pruned to these sparsities: nothing is left to do; nor is anything undone.
    assert pruned(shares, model)[1].num_pruned_now == 0
    assert pruned(dict.fromkeys(shares, 0.1), model)[2] == [6, 25, 5]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((0.5, 0.5), {}, TypeError, "ratios is a float"),
        ((0.5, {"a": -1.0}), {}, ValueError, "'a' is -1.0; expected one >= 0"),
        ((0.5, {"a": math.inf}), {}, ValueError, "finite"),
        ((0.5, {"a": True}), {}, TypeError, "bool"),
        ((0.5, {"a": 1.0}), {"lam": 0.6}, ValueError, "lam=0.6"),
        ((0.5, {"b": 1.0}), {}, ValueError, "no outlier ratio for a"),
        ((1, {"a": 1.0}), {}, TypeError, "sparsity=1 is an int"),
        ((1.5, {"a": 1.0}), {}, ValueError, "1.5 is not in"),
    ],
)
def test_refused_by_owl(arguments, options, error, text):
    with pytest.raises(error, match=text):
        budgets.owl({"a": (4, 4)}, *arguments, **options)


def test_tied_parameters_are_one():
    model = nn.ModuleDict({"a": nn.Linear(6, 10), "b": nn.Linear(6, 10), "c": nn.Linear(10, 4)})
    model["b"].weight = model["a"].weight
    targets = prune.select(model)
    # Also under the name under which the pair is not listed.
    for pair in ("a.weight", (model["b"], "weight")):
        shares = {pair: 0.5, (model["c"], "weight"): 0.25}
        report = prune.global_unstructured(targets, prune.L1Unstructured, amount=shares)
        assert [entry.num_pruned for entry in report.parameters] == [30, 10]


def steps(budget, **options):
    """Per step of a schedule, the counts of all parameters."""
    pruner = ScheduledPruner(
        prune.select(seeded(Net())),
        Linear(begin=0, end=3, frequency=1, final_sparsity=0.6),
        budget=budget,
        **options,
    )
    reports = [report for report in (pruner.step() for _ in range(4)) if report is not None]
    return [[entry.num_pruned for entry in report.parameters] for report in reports]


def test_a_schedule_divides_every_target():
    assert steps(budgets.uniform) == [[12, 10, 3], [24, 20, 6], [36, 30, 9]]
    at_most = partial(budgets.uniform, max_sparsity={"l2.weight": 0.2})
    assert steps(at_most) == [[12, 10, 3], [32, 10, 8], [52, 10, 13]]
    for option in ({"max_sparsity": 0.5}, {"scope": "layer"}, {"pattern": "2:4"}):
        with pytest.raises(ValueError, match=r"expected (one of them|a fraction|the pattern)"):
            steps(budgets.uniform, **option)


# Floors and ceilings equal the definition; distributed/test_operations.py has ranks.


SPARSITY = st.sampled_from([0.0, 0.07, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 0.95, 1.0])


def check(tensors, masks, k, floors, ceilings):
    """The masks of a call are those of the definition, or the call is refused; what held each."""
    expected = reference.prune_bounded(tensors, k, floors, ceilings, masks)
    model = nn.ParameterList(tensors)
    pairs = [(model, str(i)) for i in range(len(tensors))]
    if masks is not None:
        prune.set_masks(pairs, masks)
    limits = [dict(zip(pairs, given, strict=True)) for given in (floors, ceilings)]
    call = functools.partial(
        prune.global_unstructured, pairs, prune.L1Unstructured, amount=k,
        min_sparsity=limits[0], max_sparsity=limits[1],
    )  # fmt: skip
    if expected is None:
        with pytest.raises(ValueError, match=r"min_sparsity|max_sparsity|more than the"):
            call()
        return None
    report = call()
    for i, keep in enumerate(expected):
        assert torch.equal(getattr(model, f"{i}_mask").bool(), keep), i
    return [entry.held_at for entry in report.parameters]


@settings(max_examples=num_examples(300), deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore:the ranking over all parameters")
def test_any_bounds_on_any_data(data):
    shapes = data.draw(
        st.lists(
            st.lists(st.integers(1, 7), min_size=1, max_size=2).map(tuple), min_size=1, max_size=6
        ),
        "shapes",
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed"))
    kind = data.draw(st.sampled_from(HARD), "kind")
    # Tensors of different scale: so that bounds are met, and chains of them.
    tensors = [
        values(kind, shape, torch.float32, generator) * data.draw(st.sampled_from([0.25, 1.0, 4.0]))
        for shape in shapes
    ]
    masks = None
    if data.draw(st.booleans(), "pruned already"):
        masks = [torch.rand(shape, generator=generator) > 0.4 for shape in shapes]
    pairs = [sorted((data.draw(SPARSITY), data.draw(SPARSITY))) for _ in shapes]
    floors, ceilings = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    for i, t in enumerate(tensors):  # a floor above the ceiling is refused earlier
        if math.ceil(Fraction(str(floors[i])) * t.numel()) > Fraction(str(ceilings[i])) * t.numel():
            floors[i] = 0.0
    live = sum(t.numel() if masks is None else int(masks[i].sum()) for i, t in enumerate(tensors))
    check(tensors, masks, data.draw(st.integers(0, live), "k"), floors, ceilings)


def scaled(num, low, high):
    """Normal values whose scale rises from one tensor to the next."""
    generator = torch.Generator().manual_seed(3)
    steps = torch.linspace(math.log(low), math.log(high), num)
    return [torch.randn(30, generator=generator) * float(s.exp()) for s in steps]


def test_many_parameters_at_both_bounds():
    held = check(scaled(40, 0.01, 100), None, 600, [0.2] * 40, [0.8] * 40)
    assert held.count("max_sparsity") > 10 and held.count("min_sparsity") > 10
    assert None in held


def test_a_floor_that_holds_by_itself_once_a_ceiling_does():
    """The first cut takes ten of the first tensor, and none of the second, whose floor is two."""
    tensors = [torch.arange(1.0, 11) * 0.01, torch.arange(1.0, 21, 2), torch.arange(2.0, 22, 2)]
    held = check(tensors, None, 10, [0.0, 0.2, 0.0], [0.2, 1.0, 1.0])
    assert held == ["max_sparsity", None, None]


@pytest.mark.parametrize(
    ("n", "low", "high", "counts"),
    [
        (100, 0.07, 0.29, (7, 29)),  # 0.07 * 100 > 7 and 0.29 * 100 < 29 in binary
        (10, 0.1, 0.1, (1, 1)),
        (3, 0.5, 0.7, (2, 2)),
        (3, Fraction(1, 3), Fraction(2, 3), (1, 2)),
        (2**40 + 1, 0.5, 1, (2**39 + 1, 2**40 + 1)),
        (5, None, 0, (0, 0)),
    ],
)
def test_bounds_are_decimals(n, low, high, counts):
    bounds = to_bounds([Bounded("w", ("w",), n)], low, high)
    assert bounds == ((counts[0],), (counts[1],))


def test_keys_of_a_mapping():
    """By pair or by name, in any mix."""
    model = seeded(Net())
    targets = prune.select(model)
    report = prune.global_unstructured(
        targets, prune.L1Unstructured, amount=40,
        min_sparsity={"l1.weight": 0.6}, max_sparsity={(model.l2, "weight"): 0.02},
    )  # fmt: skip
    assert report.num_pruned == 40
    assert [entry.num_pruned for entry in report.parameters] == [36, 1, 3]
    assert [entry.held_at for entry in report.parameters] == ["min_sparsity", "max_sparsity", None]
