"""Pruning in rounds: scores of the present model, exact counts, zeros that stay."""

import itertools

import pytest
import torch

import distprune as prune
from distprune import criteria, language_models
from distprune.testing import run_ranks

SPARSITIES = [0.25, 0.5, 0.625]


def run(folder, wrap="none", finished=0, model=None):
    """(zeros after each round, errors of each update, whole weights), and the model."""
    model = model or language_models.load_sharded(folder / "llama", wrap=wrap)
    tokenizer = language_models.load_tokenizer(folder / "llama")
    windows = language_models.read_windows(tokenizer, folder / "text.txt", 16, limit=4)
    parameters = language_models.linear_layers(model)

    def score():
        fisher = criteria.Fisher(parameters, unit="rank_batch")
        language_models.calibrate(model, windows, fisher)
        return fisher.scores()

    rounds = language_models.prune_in_rounds(
        model, windows, parameters, SPARSITIES, score, finished=finished
    )
    zeros, errors = [], []
    for made in rounds:
        zeros.append([row.num_pruned for row in made.pruning.parameters])
        errors += [(row.error_before, row.error_after) for row in made.update.parameters]
    weights = [getattr(*pair).detach() for pair in parameters]
    return zeros, errors, weights, model


def on_ranks(folder, wrap):
    zeros, errors, weights, _ = run(folder, wrap)
    return zeros, errors, [getattr(w, "full_tensor", lambda w=w: w)() for w in weights]


def test_counts_are_exact_and_zeros_stay(llama_and_text):
    zeros, errors, weights, _ = run(llama_and_text)
    total = sum(weight.numel() for weight in weights)
    assert [sum(of_round) for of_round in zeros] == [round(s * total) for s in SPARSITIES]
    for first, then in itertools.pairwise(zeros):
        assert all(a <= b for a, b in zip(first, then, strict=True))
    assert sum(int((weight == 0).sum()) for weight in weights) == sum(zeros[-1])
    assert all(after <= before for before, after in errors)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["fsdp2"])
def test_ranks_prune_what_one_process_prunes(llama_and_text, wrap):
    """Scores agree to rounding, and no mask differs here; each round adds rounding to weights."""
    zeros, _, weights, _ = run(llama_and_text)
    for found, _, others in run_ranks(on_ranks, 2, llama_and_text, wrap):
        assert found == zeros
        for one, other in zip(weights, others, strict=True):
            assert torch.equal(one == 0, other == 0)
            assert (one - other).abs().max() <= 1e-4 * one.abs().max()


def test_finished_rounds_are_not_run_again(llama_and_text):
    _, _, weights, model = run(llama_and_text)
    zeros, errors, again, _ = run(llama_and_text, finished=len(SPARSITIES), model=model)
    assert not zeros and not errors
    assert all(torch.equal(one, other) for one, other in zip(weights, again, strict=True))


@pytest.mark.parametrize("sparsities", [[], [0.5, 0.5], [0.5, 0.4], [0.5, 1.0], [-0.1]])
def test_sparsities_rise(llama_and_text, sparsities):
    model = language_models.load_sharded(llama_and_text / "llama", wrap="none")
    parameters = prune.select(model)
    with pytest.raises(ValueError, match="sparsities="):
        list(language_models.prune_in_rounds(model, None, parameters, sparsities, dict))
