"""The support matrix: every wrapper and world size, trained ten steps beside one process."""

from itertools import product

import pytest

from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong
from helpers.sampling import every
from helpers.training_pair import OPTIMIZERS, Pair, train

MADE = {
    "before pruning": {"amounts": {3: 0.5}},
    "after pruning": {"amounts": {0: 0.5}, "optimizer_last": True},
}
RUNS = list(product(OPTIMIZERS, MADE))


def trained(wrapping: str, runs: list[tuple[str, str]]) -> list[str]:
    wrong = []
    for optimizer, made in runs:
        wrong += train(Pair(wrapping), optimizer, MADE[made]).wrong
    return wrong


@pytest.mark.parametrize("wrapping", wrappings.MATRIX)
def test_ten_steps_equal_one_process(wrapping):
    runs = every(len(RUNS), RUNS, wrappings.MATRIX.index(wrapping))
    assert_nothing_wrong(run_ranks(trained, wrappings.world_size(wrapping), wrapping, runs))
