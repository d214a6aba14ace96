"""The matrix of criteria: every criterion on every wrapper, beside one process.

Scores are those of one process that runs the same units; masks are, bit for bit, those of one
process that is fed these scores; what is sent besides the training's own traffic is counted.
"""

from collections.abc import Mapping
from itertools import product

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
    wrong = compare(rank, parts, expected, entry.is_exact(case))
    extra = traffic.num_bytes - baseline.num_bytes
    if extra > entry.most_bytes(rank):
        wrong.append(f"{case}: {extra} bytes were sent, not {entry.most_bytes(rank)}")
    found = {
        "wrong": wrong,
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


@pytest.mark.parametrize("title", ENTRIES)
@pytest.mark.parametrize("wrapping", wrappings.sampled(WRAPPINGS))
def test_scores_and_masks_are_those_of_one_process(wrapping, title):
    cases = cases_of(wrapping, title)
    found = run_ranks(pruned, wrappings.world_size(wrapping), title, cases)
    assert_nothing_wrong(
        [[text for each in of_rank for text in each["wrong"]] for of_rank in found]
    )
    for case, per_rank in zip(cases, zip(*found, strict=True), strict=True):
        assert num_mask_differences(title, list(per_rank)) == 0, case
