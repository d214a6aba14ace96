"""LowestScore prunes the lowest signed scores, exactly, on any sharding."""

import pytest
import torch

import distprune as prune
from distprune.call.reading import SignedScores
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on, wrong_masks
from helpers.criteria_runs import targets
from helpers.models import Net, fill

NAMES = ["l1.weight", "l2.weight", "l3.bias"]


def signed(score: float) -> float:
    return score + 0.0  # -0.0 is 0.0


def differences(wrapping: str, data: str, dtype: str) -> list[str]:
    """Two rounds, one after the other, with whole scores and with shards of them."""
    model = fill(Net(), "normal", "float32")
    indices = wrappings.local_indices(model, wrapping)
    scorer = fill(Net(), data, "float32", seed=3)
    if data == "few":  # 0.0 and -0.0 tie
        scorer.l1.weight.data.neg_()
    scores = [scorer.get_parameter(name).detach().to(getattr(torch, dtype)) for name in NAMES]
    model = wrappings.wrap(model, wrapping)
    pairs = targets(model, NAMES)
    keeps = reference.prune(scores, 0.3, key=signed)
    prune.global_unstructured(
        pairs, prune.LowestScore, dict(zip(pairs, scores, strict=True)), amount=0.3
    )
    wrong = wrong_masks(model, dict(zip(NAMES, keeps, strict=True)), indices, "whole scores")
    if dtype != "float32":
        return wrong
    keeps = reference.prune(scores, 0.5, keeps, key=signed)
    scorer = wrappings.wrap(scorer, wrapping)
    parts = [wrappings.shard(scorer, name, indices, as_dtensor=True) for name in NAMES]
    given = SignedScores(zip(pairs, parts, strict=True))
    prune.global_unstructured(pairs, prune.LowestScore, given, amount=0.5)
    return wrong + wrong_masks(model, dict(zip(NAMES, keeps, strict=True)), indices, "shards")


@pytest.mark.parametrize("data", ["normal", "few"])
@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_masks_are_those_of_one_process(wrapping, data):
    assert_nothing_wrong_on(wrapping, differences, data, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "int64"])
def test_scores_of_other_dtypes(dtype):
    assert_nothing_wrong(run_ranks(differences, 2, "fsdp2-2", "few", dtype))


def test_one_parameter_of_a_module():
    layer = torch.nn.Linear(3, 1)
    scores = torch.tensor([[0.1, -5.0, 3.0]])
    prune.LowestScore.apply(layer, "weight", amount=1, importance_scores=scores)
    assert layer.weight_mask.tolist() == [[1, 0, 1]]
    prune.LowestScore.apply(layer, "weight", 0.5, -scores)
    assert layer.weight_mask.tolist() == [[1, 0, 0]]
    with pytest.raises(TypeError, match="never ranks values"):
        prune.LowestScore.apply(layer, "weight", 1, None)


def test_every_parameter_needs_scores():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    given = {(model[0], "weight"): torch.ones(2, 3)}
    with pytest.raises(ValueError, match=r"1\.weight has no importance_scores.*L1Unstructured"):
        prune.global_unstructured(prune.select(model), prune.LowestScore, given, amount=2)
    assert not prune.is_pruned(model)


def refusals(wrapping: str) -> list[str]:
    """Signed scores and a method that ignores the sign, in both kinds of call."""
    model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping)
    pairs = targets(model, NAMES)
    given = SignedScores({pairs[0]: torch.ones(10, 6)})
    found = []
    pruner = prune.schedule.ScheduledPruner(
        pairs,
        prune.schedule.OneShot(step=0, sparsity=0.5),
        importance_scores=lambda: given,
    )
    for call in (
        lambda: prune.global_unstructured(pairs, prune.L1Unstructured, given, amount=2),
        pruner.step,
    ):
        with pytest.raises(TypeError) as error:
            call()
        found.append(str(error.value))
    assert not prune.is_pruned(wrappings.unwrapped(model))
    return found


@pytest.mark.parametrize("wrapping", ["plain-1", "fsdp2-2"])
def test_signed_scores_need_a_method_that_knows(wrapping):
    for found in run_ranks(refusals, wrappings.world_size(wrapping), wrapping):
        assert len(found) == 2
        assert all("L1Unstructured ranks |score|" in text for text in found)
        assert all("prune.LowestScore" in text for text in found)
