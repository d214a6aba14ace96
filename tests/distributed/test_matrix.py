"""The support matrix: every wrapper and world size, trained ten steps beside one process.

``pytest tests/distributed/test_matrix.py tests/integrations/test_deepspeed.py -k one_process
--write-matrix tests/distributed/matrix.json`` writes what both measured; ``python
tests/distributed/make_support_matrix.py`` makes the table of docs/support.md from it.
"""

import json
from itertools import product

import make_support_matrix
import pytest

from distprune.testing import run_ranks
from helpers import wrappings
from helpers.sampling import every
from helpers.training_pair import OPTIMIZERS, Pair, train

MADE = {
    "before pruning": {"amounts": {3: 0.5}},
    "after pruning": {"amounts": {0: 0.5}, "optimizer_last": True},
}


RUNS = list(product(OPTIMIZERS, MADE))


def trained(wrapping: str, runs: list[tuple[str, str]]) -> list[dict]:
    rows = []
    for optimizer, made in runs:
        pair = train(Pair(wrapping), optimizer, MADE[made])
        rows.append(
            {
                "optimizer": optimizer,
                "optimizer_made": made,
                "num_mask_differences": pair.num_mask_differences,
                "largest_difference": pair.largest_difference,
                "wrong": pair.wrong,
            }
        )
    return rows


@pytest.mark.parametrize("wrapping", wrappings.MATRIX)
def test_ten_steps_equal_one_process(wrapping, record_property, pytestconfig):
    runs = every(len(RUNS), RUNS, wrappings.MATRIX.index(wrapping))
    if pytestconfig.getoption("--write-matrix"):
        runs = RUNS
    per_rank = run_ranks(trained, wrappings.world_size(wrapping), wrapping, runs)
    for rows in zip(*per_rank, strict=True):
        assert not any(row["wrong"] for row in rows), rows
        differences = sum(row["num_mask_differences"] for row in rows)
        assert differences == 0
        result = {
            **rows[0],
            "wrapping": wrapping,
            "num_mask_differences": differences,
            "largest_difference": max(row["largest_difference"] for row in rows),
        }
        del result["wrong"]
        record_property("matrix", result)


def test_the_documentation_has_the_matrix_that_was_measured():
    measured = json.loads(make_support_matrix.MEASURED.read_text())
    covered = {result["wrapping"] for result in measured["results"]}
    expected = {*wrappings.MATRIX, *wrappings.ZERO}
    assert covered == expected, "run this file, and that of DeepSpeed, with --write-matrix"
    page = make_support_matrix.PAGE.read_text()
    assert make_support_matrix.START in page
    assert make_support_matrix.with_table(page, measured) == page, (
        "run python tests/distributed/make_support_matrix.py"
    )
