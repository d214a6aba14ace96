"""Pruning a checkpoint and pruning the model that it holds give the same masks, ties included.

See test_scores_from_statistics.py, too.
"""

import itertools

import pytest
import torch
from torch import nn

import distprune
from distprune.files import planning, pruning
from distprune.files.errors import CheckpointError
from distprune.files.mask_files import open_masks, read_keep
from distprune.recipes import Recipe
from distprune.schedule import ScheduledPruner
from helpers import tiny_checkpoints
from helpers.recipes import raw_recipe


def make_model(dtype):
    """Eleven layers, so that "layers.10" has its place; coarse values, so that many are equal."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 6) for _ in range(11))})
    for which, layer in enumerate(model["layers"]):
        values = (torch.randn(6, 8) * 4).round() / 8
        mixed = torch.float32 if dtype == "mixed" and which % 2 else torch.bfloat16
        layer.weight = nn.Parameter(values.to(mixed if dtype == "mixed" else dtype))
    return model


def masks_of(folder):
    masks = open_masks(folder)
    return {
        name: torch.from_numpy(
            read_keep(masks, name, 0, torch.Size(shape).numel()).reshape(shape).copy()
        )
        for name, shape in masks.shapes.items()
    }


@pytest.mark.parametrize("normalize", [None, "none"])
def test_one_recipe_with_and_without_a_normalization(tmp_path, normalize):
    mapping = {"sparsity": 0.5, "include": "layers.[0-3]*", "normalize": normalize}
    torch.manual_seed(0)
    sizes = itertools.pairwise([7, 12, 16, 9, 24, 5])
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(*size) for size in sizes)})
    for which, layer in enumerate(model["layers"]):  # of different scales
        layer.weight = nn.Parameter(torch.randn_like(layer.weight) * 3.0 ** (2 - which))
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    source = tiny_checkpoints.save(tmp_path / "source", state)
    recipe = Recipe(**mapping)
    assert recipe.divisor == ("rms" if normalize is None else None)
    report = pruning.prune(planning.plan(source, recipe), tmp_path / "target")
    ScheduledPruner.from_recipe(model, Recipe(**mapping)).step()
    wanted = {
        f"{name}.weight": module.weight_mask.bool()
        for name, module in model.named_modules()
        if hasattr(module, "weight_mask")
    }
    found = masks_of(tmp_path / "target")
    assert found.keys() == wanted.keys() and len(found) == 4
    assert all(found[name].equal(keep) for name, keep in wanted.items())
    sparsities = [tensor.num_pruned / tensor.num_elements for tensor in report.tensors]
    assert (max(sparsities) > 0.9) == (normalize == "none")


@pytest.mark.parametrize("value", [2.0**-1060, 1.5e308])
def test_fp64_that_cannot_be_divided_exactly_is_refused_by_name(tmp_path, value):
    weight = torch.full((3, 4), value, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 3, dtype=torch.float64))
    model[0].weight = nn.Parameter(weight.clone())
    text = r"0\.weight has too large or too small scores, so normalize='l2' has no meaning"
    with pytest.raises(ValueError, match=text):
        distprune.global_unstructured(
            distprune.select(model), distprune.L1Unstructured, amount=0.5, normalize="l2"
        )
    assert not hasattr(model[0], "weight_mask")
    source = tiny_checkpoints.save(tmp_path / "source", {"0.weight": weight})
    with pytest.raises(CheckpointError, match=text):
        pruning.prune(planning.plan(source, raw_recipe(0.5, normalize="l2")), tmp_path / "target")
