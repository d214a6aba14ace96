"""Fisher and Taylor by rank batches: the scores of one process that runs every rank's batches."""

import pytest

from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong
from helpers.micro_batches import CRITERIA, differences, num_tensor_ranks
from helpers.sampling import every
from helpers.wrappings import sampled

DATA = ["float64", "float32", "bfloat16", "integer float32", "integer bfloat16"]
WRAPPINGS = [*wrappings.TRAINED, *wrappings.FSDP2_DIM1]


def cases_of(wrapping: str) -> list[tuple[str, str, int]]:
    """Every kind of data once, or all of the matrix in a thorough run.

    TP adds in another order than one process: there low precision is compared on integers only.
    """
    kinds = [(kind, num_batches) for num_batches in (3, 1) for kind in CRITERIA]
    start = WRAPPINGS.index(wrapping)
    cases = [
        (kind, data, num_batches)
        for turn, data in enumerate(DATA)
        for kind, num_batches in every(len(kinds), kinds, start + turn)
    ]
    if num_tensor_ranks(wrapping) > 1:
        cases = [case for case in cases if case[1] not in ("float32", "bfloat16")]
    return cases


@pytest.mark.parametrize("wrapping", sampled(WRAPPINGS))
def test_scores_are_those_of_one_process(wrapping):
    size = wrappings.world_size(wrapping)
    assert_nothing_wrong(run_ranks(differences, size, wrapping, cases_of(wrapping)))
