"""Pruning a checkpoint and pruning the model that it holds give the same masks, ties included."""

import pytest
import torch
from torch import nn

import distprune
from distprune.files import planning, pruning
from distprune.files.checkpoints.mask_files import open_masks, read_keep
from distprune.files.disk.access import OpenFiles
from distprune.files.recipe import FileRecipe
from distprune.recipe import parse_recipe
from distprune.testing import run_ranks
from helpers import tiny_checkpoints


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
    files = OpenFiles(0)
    try:
        return {
            name: torch.from_numpy(
                read_keep(masks, files, name, 0, torch.Size(shape).numel()).reshape(shape).copy()
            )
            for name, shape in masks.shapes.items()
        }
    finally:
        files.close()


def masks_within_limits(dtype, method, sparsity, low, high):
    """In the library: each kind of layer of a model is a group."""
    model = make_model(dtype)
    with torch.no_grad():
        for which, layer in enumerate(model["layers"]):
            layer.weight.mul_(1 + which % 3)  # else limits are seldom met
    parameters = distprune.select(model)
    torch.manual_seed(3)
    distprune.global_unstructured(
        parameters, method, amount=sparsity, min_sparsity=low, max_sparsity=high,
        pipeline_parallel=True,
    )  # fmt: skip
    state = {f"{p.fqn}": p[0].weight_orig.detach() for p in parameters}
    return {p.fqn: p[0].weight_mask.bool() for p in parameters}, state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, "mixed"])
@pytest.mark.parametrize("score", ["magnitude", "random"])
def test_limits_mean_the_same_for_the_model_and_its_checkpoint(tmp_path, dtype, score):
    limits = [(0.4, 0.3, 0.5), (0.513, 0.0, 0.55), (0.3, 0.25, 1.0), (0.7, 0.5, 0.75)]
    is_random = score == "random"
    method = distprune.RandomUnstructured if is_random else distprune.L1Unstructured
    for number, each in enumerate(limits):
        ((wanted, state),) = run_ranks(masks_within_limits, 1, dtype, method, *each)
        source = tiny_checkpoints.save(tmp_path / f"source{number}", state)
        sparsity, low, high = each
        recipe = FileRecipe(
            sparsity, score=score, seed=3 if is_random else None, min_sparsity=low,
            max_sparsity=high,
        )  # fmt: skip
        pruning.prune(planning.plan(source, recipe), tmp_path / f"target{number}")
        found = masks_of(tmp_path / f"target{number}")
        assert found.keys() == wanted.keys()
        assert all(found[name].equal(keep) for name, keep in wanted.items())


def masks_of_a_recipe(dtype, mapping):
    """In the library, by a pruner that a recipe made."""
    model = make_model(dtype)
    parse_recipe(mapping).pruner(model).step()
    parameters = [(n, m) for n, m in model.named_modules() if hasattr(m, "weight_mask")]
    return {f"{name}.weight": module.weight_mask.bool() for name, module in parameters}


def test_one_recipe_for_a_model_and_its_checkpoint(tmp_path):
    mapping = {
        "version": 1, "seed": 3,
        "groups": [
            {"select": {"include": "layers.[0-4]"}, "sparsity": 0.5,
             "limits": {"max_sparsity": 0.6}},
            {"select": {"include": "re:layers[.][56].*"}, "sparsity": 0.25, "score": "random"},
            {"select": {"include": "layers.[789]"}, "sparsity": 0.75},
        ],
    }  # fmt: skip
    state = {name: tensor.detach() for name, tensor in make_model("mixed").state_dict().items()}
    source = tiny_checkpoints.save(tmp_path / "source", state)
    recipe = FileRecipe.parse(mapping)
    pruning.prune(planning.plan(source, recipe), tmp_path / "target")
    found = masks_of(tmp_path / "target")
    (wanted,) = run_ranks(masks_of_a_recipe, 1, "mixed", mapping)
    assert len(found) == 10 and found.keys() == wanted.keys()
    assert all(found[name].equal(keep) for name, keep in wanted.items())
