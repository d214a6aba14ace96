"""Layers that a ranking has emptied: the rule, for live models and files, and the warning."""

import warnings

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.base.amount import collapsed
from distprune.schedule import Linear, ScheduledPruner


def net(scale=0.001):
    """A first layer whose weights are far smaller than those of the other two."""
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 40), nn.Linear(40, 50))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for position, layer in enumerate(model):
            layer.weight.normal_(generator=generator)
            layer.bias.zero_()
            if position == 0:
                layer.weight.mul_(scale)
    return model


def warned(amount, model=None, names=("weight",), **options):
    """The report of a call, and the warnings that it gave."""
    targets = prune.select(net() if model is None else model, names=names, everything=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = prune.global_unstructured(
            targets, options.pop("method", prune.L1Unstructured), amount=amount, **options
        )
    return report, [str(each.message) for each in caught], [each.filename for each in caught]


def test_an_emptied_layer_is_named_with_the_remedies():
    report, texts, files = warned(0.3)
    assert report.collapsed == ("0.weight",) and len(texts) == 1
    for part in (
        "0.weight (100.00% pruned)", "30.00% of all elements are pruned",
        "normalize='rms'", "budgets.uniform", "max_sparsity=",
    ):  # fmt: skip
        assert part in texts[0]
    assert files == [__file__]
    assert str(report).endswith("nearly empty: 0.weight")


@pytest.mark.parametrize(
    "options",
    [
        {"normalize": "rms"},
        {"max_sparsity": 0.9},
        {"min_sparsity": {"0.weight": 0.99}},
        {"max_sparsity": {"0.weight": 0.995}},
        {"amount": {"0.weight": 1.0, "1.weight": 0.1, "2.weight": 0.1}},
        {"method": prune.RandomUnstructured},
    ],
)
def test_nothing_is_said_where_a_remedy_is_taken_or_it_was_asked_for(options):
    report, texts, _ = warned(**{"amount": 0.3, **options})
    assert texts == [] and report.collapsed == ()


@pytest.mark.parametrize("amount", [0.95, 0.99, 1.0])
def test_a_sparse_model_is_no_collapse(amount):
    assert warned(amount)[1] == []
    assert warned(amount, net(1.0))[1] == []


def test_it_is_said_once():
    """A layer that was empty before the call has not collapsed in it."""
    model = net()
    assert len(warned(0.3, model)[1]) == 1
    assert warned(0.3, model)[1] == []


def test_a_schedule_warns_at_the_step_that_empties_a_layer():
    pruner = ScheduledPruner(
        prune.select(net()), Linear(begin=0, end=4, frequency=1, final_sparsity=0.4)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reports = [pruner.step() for _ in range(5)]
    assert [report.collapsed for report in reports if report is not None and report.collapsed] == [
        ("0.weight",)
    ]
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([(1000, 500), (1000, 500)], []),
        ([(10_000, 5_000), (1000, 989)], []),
        ([(10_000, 5_000), (1000, 990)], [1]),
        ([(9000, 8010), (1000, 990)], [1]),  # 90 % of all
        ([(9000, 8011), (1000, 990)], []),
        ([(8, 8), (1_000_000, 300_000), (4, 4)], [0, 2]),
        ([(100, 100), (100, 100)], []),
        ([(0, 0), (10, 5)], []),
        ([], []),
    ],
)
def test_a_parameter_collapses_that_keeps_nothing_of_what_others_keep(counts, expected):
    assert collapsed(counts) == expected
