import json
import math
from dataclasses import replace

from distprune import ParameterReport, PruningReport

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
    assert lines[0].split() == [
        "parameter",
        "elements",
        "before",
        "now",
        "grown",
        "wanted",
        "sparsity",
    ]
    assert lines[2].endswith("20  0.00% to 50.00%    48.00%")


def test_json():
    data = json.loads(REPORT.to_json())
    assert data["parameters"][0] == {
        "name": "layers.0.weight", "num_elements": 1000, "num_pruned_before": 100,
        "num_pruned_now": 400, "held_at": None, "num_pruned": 500, "sparsity": 0.5,
        "wanted": None, "min_sparsity": None, "max_sparsity": None, "num_grown": 0,
    }  # fmt: skip
    assert data["num_pruned_now"] == 401 and data["threshold"] == 0.25
    infinite = PruningReport(**{**vars(REPORT), "threshold": math.inf})
    assert json.loads(infinite.to_json())["threshold"] == "inf"
