"""Pruning a checkpoint and pruning the model that it holds give the same masks, ties included."""

import pytest
import torch
from torch import nn

import distprune
import tiny_checkpoints
from distprune.files import planning, pruning
from distprune.files.disk import OpenFiles
from distprune.files.masks import open_masks, read_keep
from distprune.files.recipe import FileRecipe
from distprune.testing import run_ranks


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


def masks_of_model(dtype, method, scope):
    """In the library, with a process group of whatever size."""
    model = make_model(dtype)
    parameters = distprune.select(model)
    torch.manual_seed(3)
    if scope == "layer":
        for module, name in parameters:
            distprune.l1_unstructured(module, name, 0.4)
    else:
        distprune.global_unstructured(parameters, method, amount=0.4, pipeline_parallel=True)
    return {p.fqn: p[0].weight_mask.bool() for p in parameters}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, "mixed"])
@pytest.mark.parametrize("scope", ["global", "layer", "random"])
def test_masks_of_the_model_and_of_its_checkpoint(tmp_path, dtype, scope):
    state = {name: tensor.detach() for name, tensor in make_model(dtype).state_dict().items()}
    source = tiny_checkpoints.save(tmp_path / "source", state)
    is_random = scope == "random"
    recipe = FileRecipe(
        0.4,
        "global" if is_random else scope,
        score="random" if is_random else "magnitude",
        seed=3 if is_random else None,
    )
    pruning.prune(planning.plan(source, recipe), tmp_path / "target")
    method = distprune.RandomUnstructured if is_random else distprune.L1Unstructured
    (wanted,) = run_ranks(masks_of_model, 1, dtype, method, scope)
    found = masks_of(tmp_path / "target")
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(keep) for name, keep in wanted.items())
