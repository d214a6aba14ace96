"""Wanda of a model of transformers and of its checkpoint: statistics of one prune the other."""

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.files import planning, pruning
from distprune.files.recipe import FileRecipe
from distprune.statistics import ActivationStatistics
from helpers.tiny_transformers import save_tiny, tiny_model

transformers = pytest.importorskip("transformers")

CALLS = [
    {"amount": 0.5, "normalize": "rms"},
    {"amount": 0.5, "scope": "row"},
    {"pattern": "2:4"},
]


def linear_layers(model):
    from transformers.pytorch_utils import Conv1D

    pairs = prune.select(model, types=(nn.Linear, Conv1D), exclude="re:.*lm_head.*")
    return [pair for pair in pairs if len(pair.places) == 1]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen3"])
def test_masks_of_the_checkpoint_are_those_of_the_model(family, tmp_path):
    torch.manual_seed(0)
    source = save_tiny(family, tmp_path / "source")
    model = type(tiny_model(family)).from_pretrained(source)
    parameters = linear_layers(model)
    statistics = ActivationStatistics(parameters)
    with statistics.collecting():
        model(input_ids=torch.arange(40).reshape(4, 10) % 13)
    path = tmp_path / "statistics.safetensors"
    statistics.save(path)
    for number, call in enumerate(CALLS):
        live = type(model).from_pretrained(source)
        live_parameters = linear_layers(live)
        scores = ActivationStatistics.load(path, live_parameters).wanda()
        prune.global_unstructured(
            live_parameters, prune.L1Unstructured, importance_scores=scores, **call
        )
        rest = {key: value for key, value in call.items() if key != "amount"}
        recipe = FileRecipe(call.get("amount"), score="wanda", statistics=str(path), **rest)
        plan = planning.plan(source, recipe)
        assert plan.num_to_prune and not plan.warnings
        pruning.prune(plan, tmp_path / str(number))
        pruned = type(model).from_pretrained(tmp_path / str(number))
        for name, value in pruned.state_dict().items():
            expected = live.state_dict().get(name)
            if expected is None:
                original, mask = (live.state_dict()[name + end] for end in ("_orig", "_mask"))
                expected = original * mask
            assert torch.equal(value, expected), (call, name)
