"""Random sequences of operations on 1 to 3 ranks, against one process after every operation.

A failing sequence prints its seed and operations; `python tests/helpers/random_sequences --seed N`
repeats it.
"""

import pytest

from helpers.random_sequences.run import batch, run_seeds
from helpers.sampling import THOROUGH

# Batches of 25 sequences, and of these every so many.
NUM_BATCHES, STEP = (20, 1) if THOROUGH else (2, 6)


@pytest.mark.slow
@pytest.mark.timeout(2000)  # a batch that hangs is run again, one by one
@pytest.mark.parametrize("number", range(NUM_BATCHES))
def test_every_operation_does_what_it_does_in_one_process(number):
    outcomes = run_seeds(batch(number)[::STEP])
    wrong = [str(outcome) for outcome in outcomes if outcome.wrong]
    assert not wrong, "\n\n".join(wrong)[:10000]
    assert sum(outcome.operations.total() for outcome in outcomes) >= 4 * len(outcomes)
