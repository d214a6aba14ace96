"""Scores by the names of recipes: each thing that they need is collected once, on any ranks."""

import pytest
import torch

import distprune as prune
from distprune import criteria, language_models, statistics
from distprune.language_models import TextScores, calibrating
from distprune.recipes import FROM_GRADIENTS, FROM_STATISTICS


def opened(folder):
    """The scores of a model, and how often text ran through it."""
    model = language_models.load_sharded(folder / "llama")
    tokenizer = language_models.load_tokenizer(folder / "llama")
    windows = language_models.read_windows(tokenizer, folder / "text.txt", 16, limit=4)
    runs = []

    def count(progress):
        if progress.num_done == progress.total:
            runs.append(progress.phase)

    return TextScores(model, windows, prune.select(model), progress=count), runs


def direct(text, score):
    """The scores, collected without names."""
    pairs = text.parameters
    collected = {
        "fisher": statistics.GradientStatistics(pairs),
        "obs": statistics.GramMatrices(pairs),
        "taylor": criteria.Taylor(pairs, unit="rank_batch", power=1),
        "elementwise_fisher": criteria.Fisher(pairs, unit="rank_batch"),
    }.get(score) or statistics.ActivationStatistics(pairs)
    language_models.calibrate(text.model, text.windows, collected)
    is_criterion = score in ("taylor", "elementwise_fisher")
    return collected.scores() if is_criterion else getattr(collected, score)()


def zeros(text, scores):
    """What a pruning by scores leaves, as numbers of pruned weights and masks."""
    prune.global_unstructured(text.parameters, prune.L1Unstructured, scores, amount=0.5)
    masks = [getattr(module, f"{name}_mask") for module, name in text.parameters]
    for module, name in text.parameters:
        prune.remove(module, name)
    return [mask.detach().clone() for mask in masks]


@pytest.mark.filterwarnings("ignore:the ranking over all parameters")
@pytest.mark.parametrize("score", calibrating.SCORES)
def test_a_name_stands_for_what_it_is_made_of(llama_and_text, score):
    text, runs = opened(llama_and_text)
    weights = [getattr(*pair).detach().clone() for pair in text.parameters]
    found = zeros(text, text.of(score))
    assert runs == ["calibrate"]
    for pair, weight in zip(text.parameters, weights, strict=True):
        getattr(*pair).data.copy_(weight)
    expected = zeros(text, direct(text, score))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_all_names_of_recipes_that_need_text_are_known():
    assert {*FROM_STATISTICS, *FROM_GRADIENTS, "obs"} == set(calibrating.SCORES)


def test_what_is_shared_is_collected_once(llama_and_text):
    text, runs = opened(llama_and_text)
    for score in ("wanda", "ria", "stade", "fisher", "fisher", "obs", "obs"):
        text.of(score)
    assert len(runs) == 3
    text.of_round("fisher")  # of the dense model
    assert len(runs) == 3
    text.of_round("wanda")
    assert len(runs) == 4


def test_unknown_names_and_missing_text_are_errors(llama_and_text):
    text, _ = opened(llama_and_text)
    with pytest.raises(ValueError, match="score='magnitude'; expected one of wanda"):
        text.of("magnitude")
    without = TextScores(text.model, None, text.parameters)
    with pytest.raises(ValueError, match="windows=None"):
        without.of("wanda")
