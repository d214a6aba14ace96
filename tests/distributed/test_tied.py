"""Tied weights are one parameter: counted once, and masked wherever they are used.

Plain modules allow that a tied parameter is pruned differently under its names, as in torch; a
wrapper that masks the parameter once, and ``remove``, cannot keep two masks, and refuse before
anything changes: no zeros are lost in silence.
"""

import re

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from torch import nn

import distprune as prune
from distprune import checkpoint
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong, other_errors, outcome
from helpers.models import UNEVEN, seeded
from helpers.random_sequences.plans import TiedNet

TOKENS = torch.tensor([0, 3, 6, 2])
HOW = ["two calls", "one name", "together and one more"]
TEXT = r"embedding.weight|Embedding.weight|Linear.weight"


def mask_of(seed: int) -> torch.Tensor:
    return (torch.rand(7, 4, generator=torch.Generator().manual_seed(seed)) < 0.6).float()


def pruned(how: str, library=prune) -> nn.Module:
    model = seeded(TiedNet(UNEVEN))
    if how == "together and one more":
        own = torch.distributed.new_subgroups(1)[0]
        pairs = prune.select(model, "embedding")
        prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.3, group=own)
    elif how == "two calls":
        library.custom_from_mask(model.embedding, "weight", mask_of(1))
    library.custom_from_mask(model.head, "weight", mask_of(2))
    return model


def refused(wrapping: str, what: str, how: str) -> list[str]:
    model = pruned(how)
    pairs = [(model.head, "weight")]
    call = {
        "masks_aside": lambda: prune.masks_aside(model).__enter__(),
        "pruned again": lambda: prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.1),
    }[what]
    if what != "masks_aside":
        model = wrappings.wrap(model, wrapping)
    kind, text, changed = outcome(model, call)
    words = f"({TEXT})(.|\n)*(tied|masks_aside)"
    is_told = kind in ("ValueError", "RuntimeError") and re.search(words, text)
    return changed + [f"{kind}: {text}"] * (not is_told)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("what", ["masks_aside", "pruned again"])
def test_two_masks_are_refused_by_wrappers(what, how):
    assert_nothing_wrong(run_ranks(refused, 2, "fsdp2_root-2", what, how))


@pytest.mark.parametrize("how", ["two calls", "one name"])
def test_plain_modules_with_two_masks_are_as_in_torch(how):
    mine, of_torch = pruned(how), pruned(how, torch_prune)
    assert torch.equal(mine(TOKENS), of_torch(TOKENS))
    if how == "one name":  # torch writes the zeros into the parameter that both names have
        prune.remove(mine.head, "weight")
        torch_prune.remove(of_torch.head, "weight")
        assert torch.equal(mine(TOKENS), of_torch(TOKENS))


@pytest.mark.parametrize("how", ["one name", "two calls"])
def test_masks_that_differ_are_not_saved(how):
    with pytest.raises(ValueError, match="pruned differently there"):
        checkpoint.get_state_dict(pruned(how))


def prepared(wrapping: str) -> list[str]:
    model = wrappings.wrap(seeded(TiedNet(UNEVEN), 5), wrapping)
    keys = ["embedding.weight", "head.weight_orig", "head.weight_mask", "hidden.weight"]
    found = outcome(model, lambda: checkpoint.prepare_for_load(model, keys))
    return other_errors([found], "ValueError", "head.weight(.|\n)*embedding.weight")


@pytest.mark.parametrize("wrapping", ["fsdp2_root-2", "fsdp1_root-2"])
def test_a_state_dict_with_one_name_pruned(wrapping):
    assert_nothing_wrong(run_ranks(prepared, 2, wrapping))


def under_any_name(wrapping: str, listed: str, scored: str) -> list[str]:
    """The scores of a tied parameter are found, whichever of its names they are given under."""
    model = seeded(TiedNet(UNEVEN))
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(7, 4, generator=generator)
    keep = reference.prune([scores], 10)[0]
    model = wrappings.wrap(model, wrapping)
    inner = wrappings.unwrapped(model)
    pair, key = (getattr(inner, listed), "weight"), (getattr(inner, scored), "weight")
    prune.global_unstructured([pair], prune.L1Unstructured, {key: scores}, amount=10)
    mask = wrappings.whole(getattr(inner, listed).weight_mask)
    return [] if torch.equal(mask.bool(), keep) else [f"{mask}, not {keep}"]


@pytest.mark.parametrize("listed", ["embedding", "head"])
@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", "fsdp2_root-2"])
def test_scores_under_any_name_of_a_tied_parameter(wrapping, listed):
    size = wrappings.world_size(wrapping)
    for scored in ("embedding", "head"):
        assert_nothing_wrong(run_ranks(under_any_name, size, wrapping, listed, scored))


def contradictory() -> str:
    model = seeded(TiedNet(UNEVEN))
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
