"""Importance scores under a key that stands for no parameter of the call are an error.

Ignored, the parameter that was meant would be ranked by its values, in silence.
"""

import re

import pytest
import torch
import torch.distributed as dist
from test_tied import TiedNet

import distprune as prune
from distprune.base.naming import unwrap
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import (
    assert_nothing_wrong,
    changes,
    snapshot,
)
from helpers.models import Net, fill

NAMES = ["l1.weight", "l2.weight"]

CASES = {  # case -> (type of the error, what its text says)
    "misspelt": ("ValueError", r"Linear, 'weigth'\)"),
    "another module": ("ValueError", r"Linear, 'weight'\)"),
    "another parameter": ("ValueError", r"Linear, 'bias'\)"),
    "full name": ("TypeError", r"'l1\.wieght'(.|\n)*\(module, name\)"),
    "name of two letters": ("TypeError", r"'l1'(.|\n)*\(module, name\)"),
    "a number": ("TypeError", r"7(.|\n)*\(module, name\)"),
}


def wrong_key(case: str, model: torch.nn.Module) -> object:
    inner = wrappings.unwrapped(model)
    return {
        "misspelt": (unwrap(inner.l1), "weigth"),
        "another module": (unwrap(inner.l3), "weight"),
        "another parameter": (unwrap(inner.l1), "bias"),
        "full name": "l1.wieght",
        "name of two letters": "l1",
        "a number": 7,
    }[case]


def refused(wrapping: str, case: str, on_every_rank: bool) -> list[str]:
    model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping)
    pairs = prune.select(model, NAMES)
    scores = {pairs[0]: torch.ones(10, 6)}
    if on_every_rank or dist.get_rank() == 0:
        scores[wrong_key(case, model)] = torch.ones(5, 10)
    before = snapshot(model)
    kind, text = CASES[case]
    try:
        prune.global_unstructured(pairs, prune.L1Unstructured, scores, amount=0.5)
        return ["nothing was raised"]
    except Exception as error:
        wrong = changes(before, snapshot(model))
        if type(error).__name__ != kind or not re.search(text, str(error)):
            wrong.append(f"{type(error).__name__}: {error}")
        return wrong


@pytest.mark.parametrize("on_every_rank", [True, False])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("wrapping", ["plain-2", "fsdp2-2", "fsdp1-2"])
def test_unknown_keys(wrapping, case, on_every_rank):
    assert_nothing_wrong(run_ranks(refused, 2, wrapping, case, on_every_rank))


def under_any_name(wrapping: str, listed: str, scored: str) -> list[str]:
    """The scores of a tied parameter are found, whichever of its names they are given under."""
    model = fill(TiedNet(), "normal", "float32")
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(7, 4, generator=generator)
    keep = reference.prune([scores], 10)[0]
    model = wrappings.wrap(model, wrapping)
    inner = wrappings.unwrapped(model)
    pair, key = (getattr(inner, listed), "weight"), (getattr(inner, scored), "weight")
    prune.global_unstructured([pair], prune.L1Unstructured, {key: scores}, amount=10)
    mask = getattr(inner, listed).weight_mask
    if hasattr(mask, "full_tensor"):
        mask = mask.full_tensor()
    return [] if torch.equal(mask.bool(), keep) else [f"{mask}, not {keep}"]


@pytest.mark.parametrize("listed", ["embedding", "head"])
@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", "fsdp2_root-2"])
def test_scores_under_any_name_of_a_tied_parameter(wrapping, listed):
    size = wrappings.world_size(wrapping)
    for scored in ("embedding", "head"):
        assert_nothing_wrong(run_ranks(under_any_name, size, wrapping, listed, scored))


def contradictory() -> str:
    model = fill(TiedNet(), "normal", "float32")
    pairs = prune.select(model, "embedding.weight")
    scores = {
        (model.embedding, "weight"): torch.ones(7, 4),
        (model.head, "weight"): torch.rand(7, 4),
    }
    with pytest.raises(ValueError) as caught:
        prune.global_unstructured(pairs, prune.L1Unstructured, scores, amount=10)
    assert not prune.is_pruned(model)
    scores[model.head, "weight"] = scores[model.embedding, "weight"].clone()
    prune.global_unstructured(pairs, prune.L1Unstructured, scores, amount=10)
    return str(caught.value)


def test_two_scores_for_one_tied_parameter():
    assert re.search("embedding.weight(.|\n)*several of its names", contradictory())
