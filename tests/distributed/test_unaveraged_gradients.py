"""Fisher and Taylor by rank batches: the scores of one process that runs every rank's batches."""

import copy

import pytest

from distprune.criteria import Fisher, Taylor
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong
from helpers.micro_batches import (
    data_rank,
    expected_scores,
    gradients_of_units,
    loss_of,
    make_model,
    micro_batch,
    num_data_ranks,
    num_tensor_ranks,
    num_tokens,
    wrong_scores,
)
from helpers.models import fqns, target
from helpers.sampling import every
from helpers.wrappings import sampled

CRITERIA = {"fisher": (2, 0.5), "taylor 2": (2, 1.0), "taylor 1": (1, 1.0)}
DATA = ["float64", "float32", "bfloat16", "integer float32", "integer bfloat16"]
WRAPPINGS = [*wrappings.TRAINED, *wrappings.FSDP2_DIM1]


def make(kind: str, parameters: list, **options):
    if kind == "fisher":
        return Fisher(parameters, unit="rank_batch", **options)
    return Taylor(parameters, unit="rank_batch", power=CRITERIA[kind][0], **options)


def calibrate(criterion, model, dense, wrapping: str, data: str, num_batches: int) -> None:
    """This rank's micro-batches; gradients pile up in .grad, as in gradient accumulation."""
    rank = data_rank(wrapping)
    with criterion.calibrating():
        for number in range(num_batches):
            with criterion.batch(weight=num_tokens(rank, number)):
                loss_of(model, micro_batch(dense, data, rank, number)).backward()


def differences(wrapping: str, cases: list[tuple[str, str, int]]) -> list[str]:
    """Run every case (criterion, data, number of batches on each rank)."""
    wrong = []
    for kind, data, num_batches in cases:
        dense = make_model(wrapping, data)
        indices = wrappings.local_indices(copy.deepcopy(dense), wrapping)
        model = wrappings.wrap(copy.deepcopy(dense), wrapping)
        names = fqns(dense)
        criterion = make(kind, [target(wrappings.unwrapped(model), name) for name in names])
        calibrate(criterion, model, dense, wrapping, data, num_batches)
        units = gradients_of_units(dense, data, num_data_ranks(wrapping), num_batches)
        expected = expected_scores(dense, units, *CRITERIA[kind])
        when = f"{kind}, {data}, {num_batches} batches,"
        wrong += wrong_scores(model, criterion.scores(), expected, indices, data, when)
    return wrong


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
