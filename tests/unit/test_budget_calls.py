"""Budgets in calls and schedules: exact totals, the lowest elements, limits, refusals."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import nn

import distprune as prune
from distprune import budgets
from distprune.budgets.base import Line, LinearDivision
from distprune.schedule import Linear, OneShot, ScheduledPruner
from helpers.models import Net
from helpers.models import fill as fill_model

NAMES = ["l1.weight", "l2.weight", "l3.weight"]
SIZES = {"l1.weight": 60, "l2.weight": 50, "l3.weight": 15}


def pruned(budget, amount=None, model=None, **options):
    model = model or fill_model(Net(), "normal", "float32")
    report = prune.global_unstructured(
        prune.select(model),
        prune.L1Unstructured,
        amount=amount,
        budget=budget,
        **options,
    )
    return model, report, [entry.num_pruned for entry in report.parameters]


def expected_masks(model, counts):
    """The lowest elements of each parameter."""
    for name, count in zip(NAMES, counts, strict=True):
        layer = getattr(model, name[:2])
        order = torch.argsort(layer.weight_orig.detach().abs().flatten(), stable=True)
        keep = torch.ones(order.numel())
        keep[order[:count]] = 0
        yield layer.weight_mask.flatten(), keep


@pytest.mark.parametrize("amount", [0, 1, 30, 62, 124, 125, 0.5, 1.0])
@pytest.mark.parametrize("budget", ["uniform", "erk", budgets.Uniform(), budgets.ERK()])
def test_exact_totals_and_lowest_elements(budget, amount):
    model, report, counts = pruned(budget, amount)
    assert sum(counts) == (amount if isinstance(amount, int) else round(amount * 125))
    for mask, keep in expected_masks(model, counts):
        assert torch.equal(mask, keep)
    assert report.threshold is None


def test_layer_scope():
    assert pruned("uniform", 0.2)[2] == [12, 10, 3]
    # 31.25: 15, 12.5 and 3.75 of them; the largest remainder is that of l3.
    assert pruned("uniform", 31)[2] == [15, 12, 4]


def test_what_is_pruned_already_counts():
    model, _, _ = pruned({"l1.weight": 0.5, "l2.weight": 0.0, "l3.weight": 0})
    _, report, counts = pruned("uniform", 20, model)
    assert counts == [30, 15, 5] and report.num_pruned_now == 20
    _, _, counts = pruned("uniform", 0, model)
    assert counts == [30, 15, 5]


def test_floors_and_ceilings_hold_inside_a_budget():
    _, report, counts = pruned(
        "uniform", 50, min_sparsity={"l3.weight": 0.8}, max_sparsity={"l2.weight": 0.1}
    )
    assert counts == [33, 5, 12]
    held = [entry.held_at for entry in report.parameters]
    assert held == [None, "max_sparsity", "min_sparsity"]
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
    for mask, keep in expected_masks(model, counts):
        assert torch.equal(mask, keep)
    # Pruned to these sparsities: nothing is left to do; nor is anything undone.
    assert pruned(shares, model=model)[1].num_pruned_now == 0
    fewer = dict.fromkeys(shares, 0.1)
    assert pruned(fewer, model=model)[2] == [6, 25, 5]


def test_a_mapping_and_an_amount_have_to_agree():
    shares = {"l1.weight": 0.05, "l2.weight": 0.5, "l3.weight": 0.25}  # 3, 25 and 3.75
    assert pruned(shares)[2] == [3, 25, 4]
    assert pruned(shares, 32)[2] == [3, 25, 4]
    assert pruned(shares, 31)[2] == [3, 25, 3]
    for amount in (30, 33, 0.5):
        with pytest.raises(ValueError, match="budget= for 31 to 32; expected the same"):
            pruned(shares, amount)
    relative = budgets.Sparsities(shares, relative=True)
    assert pruned(relative, 63)[2] == [6, 50, 7]  # 6, 50 and 7.5, but the total is 63
    assert pruned(relative, 90)[2] == [25, 50, 15]  # l2 is full, and l3: the rest is of l1
    for without_total in (relative, "uniform"):
        with pytest.raises(TypeError, match="amount"):
            pruned(without_total)


@pytest.mark.parametrize(
    ("budget", "error", "text"),
    [
        ({"l1.weight": 0.5, "l2.weight": 0.5}, ValueError, "does not have l3.weight"),
        ({**dict.fromkeys(NAMES, 0.5), "l9": 0.1}, ValueError, "'l9', which is none"),
        (dict.fromkeys(NAMES, 1.5), ValueError, r"budget\[l1.weight\]=1.5 is not in \[0, 1\]"),
        (dict.fromkeys(NAMES, math.nan), ValueError, "nan"),
        (dict.fromkeys(NAMES, "0.5"), TypeError, "'0.5'"),
        ("lampp", ValueError, "budget='lampp'; expected one of 'uniform'"),
        ("owl", ValueError, r"budgets.OWL\(ratios\)"),
        (budgets.ERK, TypeError, r"such as budgets.ERK\(\)"),
        (0.5, TypeError, "budget is 0.5"),
        (budgets.OWL({"l1.weight": 1.0}), ValueError, "no outlier ratio for l2.weight"),
    ],
)  # fmt: skip
def test_refused(budget, error, text):
    model = fill_model(Net(), "normal", "float32")
    with pytest.raises(error, match=text):
        pruned(budget, 50, model)
    assert not prune.is_pruned(model)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0.5,), TypeError, "ratios is a float"),
        (({"a": -1.0},), ValueError, "'a' is -1.0; expected one >= 0"),
        (({"a": math.inf},), ValueError, "finite"),
        (({"a": True},), TypeError, "bool"),
        (({"a": 1.0}, 0.6), ValueError, "lam=0.6"),
    ],
)
def test_refused_by_owl(arguments, error, text):
    ratios, *lam = arguments
    with pytest.raises(error, match=text):
        budgets.OWL(ratios, **({"lam": lam[0]} if lam else {}))


def test_random_pruning_with_a_budget():
    model = fill_model(Net(), "normal", "float32")
    report = prune.global_unstructured(
        prune.select(model), prune.RandomUnstructured, amount=0.2, budget="uniform"
    )
    assert [entry.num_pruned for entry in report.parameters] == [12, 10, 3]


@pytest.mark.parametrize("amount", [0, 60])
def test_nan_is_refused(amount):
    model = fill_model(Net(), "normal", "float32")
    with torch.no_grad():
        model.l2.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"l2.weight \(1 of 50\) are NaN"):
        pruned("uniform", amount, model)
    assert not prune.is_pruned(model)


def test_tied_parameters_are_one():
    model = nn.ModuleDict({"a": nn.Linear(6, 10), "b": nn.Linear(6, 10), "c": nn.Linear(10, 4)})
    model["b"].weight = model["a"].weight
    targets = prune.select(model)
    for name in ("a.weight", "b.weight"):
        shares = {name: 0.5, "c.weight": 0.25}
        if name == "b.weight":  # the name under which the pair is not listed
            shares = {(model["b"], "weight"): 0.5, (model["c"], "weight"): 0.25}
        report = prune.global_unstructured(targets, prune.L1Unstructured, budget=shares)
        assert [entry.num_pruned for entry in report.parameters] == [30, 10]
    assert model["a"].weight_mask is model["b"].weight_mask
    report = prune.global_unstructured(targets, prune.L1Unstructured, amount=0, budget="uniform")
    assert [entry.wanted for entry in report.parameters] == [0.4, 0.4]


def test_the_report_says_what_was_wanted():
    model, _, _ = pruned({"l1.weight": 0.5, "l2.weight": 0.0, "l3.weight": 0})
    _, report, _ = pruned("uniform", 20, model, max_sparsity={"l2.weight": 0.2})
    assert [entry.wanted for entry in report.parameters] == [0.4, 0.4, 0.4]
    assert [entry.sparsity for entry in report.parameters] == [32 / 60, 0.2, 8 / 15]
    assert [entry.max_sparsity for entry in report.parameters] == [None, 0.2, None]
    lines = str(report).splitlines()
    assert lines[0].split() == ["parameter", "elements", "before", "now", "wanted", "sparsity",
                                "held", "at"]  # fmt: skip
    assert lines[3].split() == ["l2.weight", "50", "0", "10", "40.00%", "20.00%", "max_sparsity"]
    assert report.to_dict()["parameters"][1]["wanted"] == 0.4
    _, report, _ = pruned(None, 20, max_sparsity=0.5, min_sparsity={"l1.weight": 0.1})
    wanted = [entry.wanted_text for entry in report.parameters]
    assert wanted == ["10.00% to 50.00%", "at most 50.00%", "at most 46.67%"]


class Halves(budgets.Budget):
    """A budget of a user: the first parameter gets half of all."""

    def divide(self, parameters):
        sizes = [each.num_elements for each in parameters]
        lines = [Line(0, sum(sizes[1:])), *(Line(0, n) for n in sizes[1:])]
        return LinearDivision("halves", tuple(parameters), tuple(lines), tuple(sizes))


def test_a_budget_of_a_user():
    assert repr(Halves()) == "Halves()"
    assert pruned(Halves(), 40)[2] == [20, 15, 5]


def steps(budget, final=0.6, **options):
    """Per step of a schedule, the counts of all parameters."""
    model = fill_model(Net(), "normal", "float32")
    pruner = ScheduledPruner(
        prune.select(model),
        Linear(begin=0, end=3, frequency=1, final_sparsity=final),
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
    for counts in (steps("erk"), steps("lamp")):
        assert [sum(row) for row in counts] == [25, 50, 75]
        assert all(a <= b for row, more in itertools.pairwise(counts)
                   for a, b in zip(row, more, strict=True))  # fmt: skip


def test_a_schedule_with_floors_and_a_budget():
    """While the target is below the sum of the floors, no count goes beyond its floor."""
    rows = steps("uniform", min_sparsity={"l3.weight": 1.0, "l2.weight": 0.5})
    assert [sum(row) for row in rows] == [25, 50, 75]
    assert all(n <= floor for n, floor in zip(rows[0], (0, 25, 15), strict=True))
    assert rows[1] == [10, 25, 15] and rows[2] == [33, 27, 15]


def test_groups_have_budgets_of_their_own():
    model = fill_model(Net(), "normal", "float32")
    one, two, three = prune.select(model)
    pruner = ScheduledPruner(
        [{"parameters": [one, two]}, {"parameters": [three], "budget": {"l3.weight": 1.0}}],
        OneShot(step=0, sparsity=0.2),
        budget="uniform",
    )
    counts = [entry.num_pruned for entry in pruner.step().parameters]
    assert counts == [12, 10, 3]


@pytest.mark.parametrize(
    ("budget", "error", "text"),
    [("lampp", ValueError, "lampp"), ({"l1.weight": 1.0}, ValueError, "does not have l2.weight")],
)
def test_refused_by_the_constructor_of_a_schedule(budget, error, text):
    with pytest.raises(error, match=text):
        steps(budget)
