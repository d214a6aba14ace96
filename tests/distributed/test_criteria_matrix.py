"""The matrix of criteria: every criterion on every wrapper, beside one process.

Scores are those of one process that runs the same units; masks are, bit for bit, those of one
process that is fed these scores; what is sent besides the training's own traffic is counted.

``pytest tests/distributed/test_criteria_matrix.py --write-criteria PATH`` writes what was measured
(tests/distributed/criteria.json); ``python tests/distributed/make_criteria_table.py`` makes the
table of the documentation from it.
"""

import json
import re
from collections.abc import Mapping
from itertools import product

import make_criteria_table
import pytest
import torch
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

import distprune as prune
from distprune import criteria
from distprune.testing import run_ranks
from helpers import criteria_runs as runs
from helpers import criterion_references as references
from helpers import reference, wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import (
    assembled,
    assert_nothing_wrong,
    assert_nothing_wrong_on,
    wrong_masks,
)
from helpers.criteria_cases import WEIGHTS, Case, Dense, Rank, compare, mask_parts, whole_scores
from helpers.criteria_table import ENTRIES, pruning_method
from helpers.sampling import THOROUGH, every

AMOUNT = 0.4
SHAPES = list(product((1, 3), ("equal", "unequal")))  # numbers of batches, and of their rows
WRAPPINGS = wrappings.TRAINED


def cases_of(wrapping: str, title: str) -> list[Case]:
    """The cases of a criterion on a wrapping; by default one of integers and one of others."""
    entry = ENTRIES[title]
    integers, others = (
        [
            Case(wrapping, data, dtype, num_batches, counts)
            for dtype in dtypes
            for num_batches, counts in (SHAPES if entry.has_batches else SHAPES[:1])
        ]
        for data, dtypes in (("integer", entry.dtypes), ("normal", entry.dtypes[:1]))
    )
    if THOROUGH:
        return integers + others
    turn = WRAPPINGS.index(wrapping) + 3 * list(ENTRIES).index(title)
    return [integers[turn % len(integers)], others[(turn + 1) % len(others)]]


def measured(title: str, case: Case) -> tuple[Rank, Mapping, dict]:
    """The scores of one rank, and what was found about them."""
    entry = ENTRIES[title]
    net = entry.nets[case.data]
    rank = Rank(case, net)
    with Traffic() as baseline:
        entry.baseline(rank)
    with Traffic() as traffic:
        scores = entry.run(rank)
    expected = entry.expected(Dense(case, net))
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


def refusals(title: str, dtype: str) -> str:
    entry = ENTRIES[title]
    case = Case("fsdp2-2", "integer", dtype, 1, "equal")
    try:
        entry.run(Rank(case, entry.nets["integer"]))
    except NotImplementedError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize("title", [title for title, e in ENTRIES.items() if e.refused_dtypes])
def test_what_is_not_computed_in_a_dtype_is_refused_by_name(title):
    for dtype in ENTRIES[title].refused_dtypes:
        for message in run_ranks(refusals, 2, title, dtype):
            assert re.match(r"\S+\.weight.*needs a model that computes in float32", message), (
                message
            )


# DDP multiplies by 1/3, which is no float: there scores equal only to rounding.
EXACT = [w for w in wrappings.sampled(WRAPPINGS) if w != "ddp-3"]


def differences_of_rounds(wrapping: str) -> list[str]:
    model = runs.integer_net(wrapping)
    indices = wrappings.local_indices(model, wrapping)
    ones = torch.ones(1, model.l1.in_features)
    masks = references.synflow_masks(model, runs.WEIGHTS, ones, 0.8, 4)
    model = wrappings.wrap(model, wrapping)
    criterion = criteria.SynFlow(runs.named_targets(model, runs.WEIGHTS), model=model)
    report = criterion.prune(lambda: model(ones), 0.8, rounds=4)
    wrong = wrong_masks(model, masks, indices)
    if report.num_pruned != round(0.8 * report.num_elements):
        wrong.append(f"{report.num_pruned} are pruned of {report.num_elements}")
    return wrong


@pytest.mark.parametrize("wrapping", every(2, EXACT))
def test_rounds_of_synflow_have_the_masks_of_one_process(wrapping):
    assert_nothing_wrong_on(wrapping, differences_of_rounds)


def messages_of_mixed_precision(wrapping: str, kind: str) -> str:
    policy = (
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
        if wrapping.startswith("fsdp2")
        else {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}
    )
    model = wrappings.wrap(runs.integer_net(wrapping), wrapping, **policy)
    try:
        getattr(criteria, kind)(runs.named_targets(model, runs.WEIGHTS), model=model)
    except NotImplementedError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("kind", ["GraSP", "SynFlow"])
@pytest.mark.parametrize("wrapping", ["fsdp1-2", "fsdp2-2"])
def test_mixed_precision_is_refused_by_name(wrapping, kind):
    for message in run_ranks(messages_of_mixed_precision, 2, wrapping, kind):
        assert message.startswith(f"l1.weight: {kind} needs a model that computes in float32")
        assert "gathered in another dtype" in message


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
