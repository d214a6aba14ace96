"""Random sequences of operations on 1 to 3 ranks, against one process after every operation.

A failing sequence prints its seed and operations; `python tests/sequences.py --seed N` repeats it.
"""

import pytest

import sequences

NUM_BATCHES = 20  # of 25 sequences


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_BATCHES))
def test_every_operation_does_what_it_does_in_one_process(number):
    outcomes = sequences.run_seeds(sequences.batch(number))
    wrong = [str(outcome) for outcome in outcomes if outcome.wrong]
    assert not wrong, "\n\n".join(wrong)[:10000]
    assert sum(outcome.operations.total() for outcome in outcomes) >= 4 * len(outcomes)
