"""The operations of test_operations.py in any order, on 1 to 3 ranks, beside one process.

A sequence is a function of its seed. One that differs is printed without what it does not need.
"""

import random
from operator import itemgetter

import pytest
from test_operations import chosen_masks, life, ranked_globally, segments, single

from helpers import wrappings
from helpers.models import DATA, EVEN, EVEN_HIDDEN, UNEVEN
from helpers.random_sequences.plans import Plan
from helpers.random_sequences.run import run_together, shrunk
from helpers.sampling import THOROUGH

# Batches of sequences that share a world size, and a process group.
WORLD_SIZES = (2, 3, 1, 2, 3) * 4 if THOROUGH else (2, 3)
NUM_SEQUENCES = 25 if THOROUGH else 5
WRAPPINGS = [*wrappings.TRAINED, *wrappings.FSDP2_DIM1]


def draw(seed: int, world_size: int) -> Plan:
    chosen = random.Random(seed)
    sizes = chosen.choice([UNEVEN, EVEN_HIDDEN, EVEN])
    possible = (sizes, UNEVEN) if sizes == EVEN_HIDDEN else (UNEVEN, EVEN_HIDDEN, EVEN)
    fitting = [
        name
        for name in WRAPPINGS
        if wrappings.world_size(name) == world_size
        and wrappings.runnable_sizes(name) in ([UNEVEN] if sizes == UNEVEN else possible)
    ]
    family, number = chosen.choice(["net", "norm"]), chosen.randrange(100)
    rows = [
        *ranked_globally(number), *single(number), *segments(number, family, sizes),
        *chosen_masks(number), *life(number, sizes, chosen.choice(fitting)),
    ]  # fmt: skip
    pool = [operation for operations in map(itemgetter(3), rows) for operation in operations]
    data, dtype = chosen.choice(DATA[:-1]), chosen.choice(["float32", "bfloat16", "float64"])
    operations = chosen.sample(pool, chosen.randint(4, 12))
    optimizer = chosen.choice(["adamw", "sgd"])
    made = family, sizes, dtype, data, chosen.choice(fitting), optimizer
    return Plan(seed, *made, tuple(operations))


@pytest.mark.slow
@pytest.mark.timeout(2000)  # a batch that hangs is run again, one by one
@pytest.mark.parametrize("number", range(len(WORLD_SIZES)))
def test_every_operation_does_what_it_does_in_one_process(number):
    seeds = range(number * NUM_SEQUENCES, (number + 1) * NUM_SEQUENCES)
    outcomes = run_together([draw(seed, WORLD_SIZES[number]) for seed in seeds])
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    assert not wrong, f"{len(wrong)} differ, among them {shrunk(wrong[0])}"[:10000]
    assert sum(outcome.operations.total() for outcome in outcomes) >= 4 * len(outcomes)
