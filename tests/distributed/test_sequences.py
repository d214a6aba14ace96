"""Random sequences of operations on 1 to 3 ranks, against one process after every operation.

A failing sequence prints its seed and operations; `python tests/helpers/random_sequences --seed N`
repeats it.
"""

from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest
import torch

import distprune.checkpoint
import distprune.selection.search
import distprune.torch_private.fsdp2_mask
from distprune.selection.candidates import Cut
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.random_sequences.plans import draw
from helpers.random_sequences.run import Outcome, batch, run_plans, run_seeds
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


def ties_are_cut_off_by_one() -> AbstractContextManager:
    def cut(threshold: int, parameter: int, index: int) -> Cut:
        return Cut(threshold, parameter, index + 1 if index else index)

    return patch.object(distprune.selection.search, "Cut", cut)


def fsdp2_gathers_what_is_not_masked() -> AbstractContextManager:
    def copied(values: torch.Tensor, mask: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(values)

    return patch.object(distprune.torch_private.fsdp2_mask, "write_product", copied)


def rows_of_a_mask_are_exchanged_by_loading() -> AbstractContextManager:
    original = distprune.checkpoint._set_state_dict

    def exchanged(model, *rest) -> None:
        original(model, *rest)
        for mask in distprune.checkpoint._pruned_here(model).values():
            local = wrappings.local(mask)
            local.copy_(local.flip(0))

    return patch.object(distprune.checkpoint, "_set_state_dict", exchanged)


MUTANTS = [
    ties_are_cut_off_by_one,
    fsdp2_gathers_what_is_not_masked,
    rows_of_a_mask_are_exchanged_by_loading,
]


def outcomes_of(which: int, folder: str) -> list[Outcome]:
    """The first sequences of a mutant, until one differs."""
    plans = [draw(seed) for seed in batch(0)]
    with MUTANTS[which]():
        return run_plans(plans, folder, until_wrong=True)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("which", range(len(MUTANTS)), ids=lambda i: MUTANTS[i].__name__)
def test_a_fault_in_the_library_is_found(which, tmp_path):
    """In what 25 sequences do on 2 ranks."""
    for outcomes in run_ranks(outcomes_of, 2, which, str(tmp_path)):
        assert outcomes[-1].wrong, f"{len(outcomes)} sequences show no difference"
