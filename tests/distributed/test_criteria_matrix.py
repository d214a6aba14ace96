"""The matrix of criteria: every criterion on every wrapper, beside one process.

Scores are those of one process that runs the same units; masks are, bit for bit, those of one
process that is fed these scores; what is sent besides the training's own traffic is counted.

``pytest tests/distributed/test_criteria_matrix.py --write-criteria PATH`` writes what was measured
(tests/distributed/criteria.json); ``python tests/distributed/make_criteria_table.py`` makes the
table of the documentation from it.
"""

import json
from collections.abc import Mapping
from itertools import product

import make_criteria_table
import pytest

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assembled, assert_nothing_wrong
from helpers.criteria_cases import WEIGHTS, Case, Dense, Rank, compare, mask_parts, whole_scores
from helpers.criteria_table import ENTRIES, pruning_method
from helpers.sampling import THOROUGH

AMOUNT = 0.4
SHAPES = list(product((1, 3), ("equal", "unequal")))  # numbers of batches, and of their rows
WRAPPINGS = wrappings.TRAINED


def cases_of(wrapping: str, title: str) -> list[Case]:
    """The cases of a criterion on a wrapping; by default one of integers and one of others."""
    integers, others = (
        [Case(wrapping, data, dtype, *shape) for dtype in dtypes for shape in SHAPES]
        for data, dtypes in (("integer", ("float32", "bfloat16")), ("normal", ("float32",)))
    )
    if THOROUGH:
        return integers + others
    turn = WRAPPINGS.index(wrapping) + 3 * list(ENTRIES).index(title)
    return [integers[turn % len(integers)], others[(turn + 1) % len(others)]]


def measured(title: str, case: Case) -> tuple[Rank, Mapping, dict]:
    """The scores of one rank, and what was found about them."""
    entry = ENTRIES[title]
    rank = Rank(case)
    with Traffic() as baseline:
        entry.baseline(rank)
    with Traffic() as traffic:
        scores = entry.run(rank)
    expected = entry.expected(Dense(case))
    parts = whole_scores(rank, scores)
    wrong, largest = compare(rank, parts, expected, entry.is_exact(case))
    extra = traffic.num_bytes - baseline.num_bytes
    if extra > entry.most_bytes(rank):
        wrong.append(f"{case}: {extra} bytes were sent, not {entry.most_bytes(rank)}")
    found = {
        "wrong": wrong,
        "largest_difference": largest,
        "extra_bytes": extra,
        "scores": parts,
        "indices": [rank.indices[name] for name in WEIGHTS],
        "shapes": [tuple(expected[name].shape) for name in WEIGHTS],
    }
    return rank, scores, found


def pruned(title: str, cases: list[Case]) -> list[dict]:
    """The same for some cases, with the masks of a pruning by these scores."""
    results = []
    for case in cases:
        rank, scores, found = measured(title, case)
        method = pruning_method(ENTRIES[title])
        prune.global_unstructured(rank.pairs, method, scores, amount=AMOUNT)
        results.append(found | {"masks": mask_parts(rank)})
    return results


def num_mask_differences(title: str, per_rank: list[dict]) -> int:
    """Elements of masks that are not those of one process that is fed the scores of all ranks."""
    scores, masks = [], []
    for number, shape in enumerate(per_rank[0]["shapes"]):
        for which, whole in (("scores", scores), ("masks", masks)):
            held = [(r[which][number], r["indices"][number]) for r in per_rank]
            whole.append(assembled(held, shape))
    key = float if ENTRIES[title].is_signed else abs
    keeps = reference.prune(scores, AMOUNT, key=key)
    return sum(int((keep != (mask != 0)).sum()) for keep, mask in zip(keeps, masks, strict=True))


def rows_of(title: str, cases: list[Case]) -> tuple[list[list[str]], list[dict]]:
    """(what is wrong on each rank, a row of the matrix per case)."""
    size = wrappings.world_size(cases[0].wrapping)
    found = run_ranks(pruned, size, title, cases)
    wrong: list[list[str]] = [[] for _ in range(size)]
    rows = []
    for case, per_rank in zip(cases, zip(*found, strict=True), strict=True):
        for mine, result in zip(wrong, per_rank, strict=True):
            mine += result["wrong"]
        differences = num_mask_differences(title, list(per_rank))
        if differences:
            wrong[0].append(f"{case}: {differences} elements of the masks are wrong")
        rows.append(
            {
                "criterion": title,
                **vars(case),
                "largest_difference": max(r["largest_difference"] for r in per_rank),
                "num_mask_differences": differences,
                "extra_bytes": max(r["extra_bytes"] for r in per_rank),
            }
        )
    return wrong, rows


@pytest.mark.parametrize("title", ENTRIES)
@pytest.mark.parametrize("wrapping", wrappings.sampled(WRAPPINGS))
def test_scores_and_masks_are_those_of_one_process(wrapping, title, record_property):
    wrong, rows = rows_of(title, cases_of(wrapping, title))
    assert_nothing_wrong(wrong)
    for row in rows:
        record_property("criteria", row)


def test_the_documentation_has_the_table_that_was_measured():
    measured_rows = json.loads(make_criteria_table.MEASURED.read_text())
    covered = {
        (row["criterion"], wrappings.kind_of(row["wrapping"])) for row in measured_rows["results"]
    }
    kinds = {wrappings.kind_of(wrapping) for wrapping in WRAPPINGS}
    assert covered == set(product(ENTRIES, kinds)), "run this file with --write-criteria"
    about = json.loads(json.dumps({title: entry.about for title, entry in ENTRIES.items()}))
    assert measured_rows["about"] == about, "run this file with --write-criteria"
    text = make_criteria_table.page_with_table(measured_rows)
    assert make_criteria_table.PAGE.read_text() == text, (
        "run python tests/distributed/make_criteria_table.py"
    )
