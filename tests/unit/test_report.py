import json
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import distprune as prune
from distprune import ParameterReport, PruningReport
from distprune.base.amount import collapsed
from distprune.schedule import Linear, ScheduledPruner

REPORT = PruningReport(
    method="L1Unstructured",
    amount=0.5,
    parameters=(
        ParameterReport("layers.0.weight", 1000, 100, 400),
        ParameterReport("head.weight", 3_000_000_000, 0, 1),
    ),
    threshold=0.25,
    num_ties=7,
    num_ties_pruned=3,
    num_ranks=4,
    num_collectives=12,
    bytes_sent=123456,
    seconds=0.5,
)


def test_totals():
    assert REPORT.num_elements == 3_000_001_000
    assert (REPORT.num_pruned_before, REPORT.num_pruned_now, REPORT.num_pruned) == (100, 401, 501)
    assert REPORT.parameters[0].sparsity == 0.5
    assert REPORT.sparsity == 501 / 3_000_001_000
    assert replace(REPORT.parameters[0], num_grown=20).num_pruned == 480


def test_table():
    assert str(REPORT) == "\n".join([
        "parameter             elements  before  now  sparsity",
        "-----------------------------------------------------",
        "layers.0.weight          1,000     100  400    50.00%",
        "head.weight      3,000,000,000       0    1     0.00%",
        "-----------------------------------------------------",
        "total            3,000,001,000     100  401     0.00%",
        "L1Unstructured, amount=0.5; threshold 0.25 (3 of 7 ties pruned); 4 ranks; "
        "12 collectives, 123,456 bytes per rank; 0.5 s",
    ])  # fmt: skip


def test_what_was_wanted_stands_beside_what_was_achieved():
    first = ParameterReport("layers.0.weight", 1000, 100, 400, "max_sparsity", 0.625, None, 0.5)
    lines = str(replace(REPORT, parameters=(first, REPORT.parameters[1]))).split("\n")
    assert lines[:4] == [
        "parameter             elements  before  now  wanted  sparsity       held at",
        "---------------------------------------------------------------------------",
        "layers.0.weight          1,000     100  400  62.50%    50.00%  max_sparsity",
        "head.weight      3,000,000,000       0    1             0.00%",
    ]
    bounded = replace(first, wanted=None, held_at=None, max_sparsity=0.5, num_grown=20)
    lines = str(replace(REPORT, parameters=(bounded,))).split("\n")
    words = "parameter elements before now grown wanted sparsity"
    assert " ".join(lines[0].split()) == words
    assert lines[2].endswith("20  0.00% to 50.00%    48.00%")


def test_json():
    data = json.loads(json.dumps(REPORT.to_dict()))
    assert data["parameters"][0] == {
        "name": "layers.0.weight", "num_elements": 1000, "num_pruned_before": 100,
        "num_pruned_now": 400, "held_at": None, "num_pruned": 500, "sparsity": 0.5,
        "wanted": None, "min_sparsity": None, "max_sparsity": None, "num_grown": 0,
    }  # fmt: skip
    assert data["num_pruned_now"] == 401 and data["threshold"] == 0.25


# Layers that a ranking has emptied: the rule, for live models and files, and the warning.


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
