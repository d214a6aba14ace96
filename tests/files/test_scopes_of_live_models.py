"""The file path and the live path give the same masks for the same weights."""

from contextlib import closing

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import distprune as prune
from distprune._common.selecting import natural_key
from distprune.files import planning, pruning
from distprune.files.checkpoints.mask_files import open_masks, read_keep
from distprune.files.disk.access import OpenFiles
from distprune.files.errors import SelectionError
from distprune.files.recipe import FileRecipe
from distprune.recipe import parse_recipe
from helpers.models import target, values
from helpers.sampling import every

CHOICES = [
    {"sparsity": 0.4},
    {"score": "random", "seed": 3, "scope": "row", "sparsity": 0.5},
    {"score": "random", "seed": 3, "pattern": "2:4"},
    {"scope": "layer", "sparsity": 0.35},
    {"scope": "row", "sparsity": 0.3},
    {"scope": "row", "sparsity": 0.7},
    {"pattern": "2:4"},
    {"pattern": "1:2"},
    {"pattern": "4:8"},
    {"pattern": "3:4"},
    {"pattern": "2x4", "sparsity": 0.4},
    {"pattern": "2x4", "sparsity": 0.4, "scope": "layer"},
    {"pattern": "2x4", "sparsity": 0.4, "scope": "row"},
    {"pattern": "1x8", "sparsity": 0.5, "scope": "row"},
    {"pattern": "2x1", "sparsity": 0.3},
    {"score": "random", "seed": 3, "pattern": "2x4", "sparsity": 0.5},
    {"score": "random", "seed": 3, "pattern": "2x2", "sparsity": 0.5, "scope": "row"},
]


class Shapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 10)
        self.conv = nn.Conv2d(8, 6, 3)
        self.turned = nn.ConvTranspose2d(8, 4, 2)
        self.experts = nn.Module()
        self.experts.weight = nn.Parameter(torch.zeros(3, 6, 16))
        self.raw = nn.Module()
        self.raw.matrix = nn.Parameter(torch.zeros(16, 8))  # [in, out]


INPUT_DIMS = {"experts.weight": 2, "raw.matrix": 0}


@pytest.mark.parametrize("data", ["normal", "few", "equal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_masks(tmp_path, data, dtype):
    generator = torch.Generator().manual_seed(1)
    model = Shapes().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(values(data, parameter.shape, dtype, generator))
    source = tmp_path / "model"
    source.mkdir()
    save_file(dict(model.state_dict()), source / "model.safetensors")
    names = [name for name, p in model.named_parameters() if p.ndim > 1]
    names.sort(key=natural_key)
    turn = ["normal", "few", "equal"].index(data) + 3 * (dtype == torch.bfloat16)
    for number, choice in every(3, enumerate(CHOICES), turn):
        recipe = FileRecipe(include=tuple(names), input_dims=INPUT_DIMS, **choice)
        result = tmp_path / f"result-{number}"
        pruning.prune(planning.plan(source, recipe), result)
        live = Shapes().to(dtype)
        live.load_state_dict(model.state_dict())
        arguments = {key: choice[key] for key in ("scope", "pattern") if key in choice}
        if "sparsity" in choice:
            arguments["amount"] = choice["sparsity"]
        method = prune.L1Unstructured
        if choice.get("score") == "random":
            method = prune.RandomUnstructured
            torch.manual_seed(choice["seed"])
        pairs = [prune.NamedParameter(*target(live, name), name) for name in names]
        report = prune.global_unstructured(pairs, method, input_dims=INPUT_DIMS, **arguments)
        by_recipe = Shapes().to(dtype)
        by_recipe.load_state_dict(model.state_dict())
        recipe_of_model = parse_recipe(
            {
                "version": 1,
                **choice,
                "select": {
                    "include": names, "input_dims": INPUT_DIMS, "names": ["weight", "matrix"],
                },
            }
        )  # fmt: skip
        recipe_of_model.pruner(by_recipe).step()
        masks = open_masks(result)
        with closing(OpenFiles(0)) as files:
            for name, pair in zip(names, pairs, strict=True):
                mask = getattr(pair[0], pair[1] + "_mask").bool()
                keep = read_keep(masks, files, name, 0, mask.numel()).reshape(mask.shape)
                assert torch.equal(mask, torch.from_numpy(keep)), (choice, name)
                if "score" in choice or ("sparsity" in choice and "scope" not in choice):
                    continue  # a model lists its parameters in another order than a folder
                module, parameter = target(by_recipe, name)
                assert torch.equal(mask, getattr(module, parameter + "_mask").bool())
        assert report.num_pruned == planning.plan(source, recipe).num_to_prune


def test_kept_nan_are_refused_beside_tiles():
    with pytest.raises(SelectionError, match="a tile with a NaN has no sum"):
        FileRecipe(pattern="4x4", sparsity=0.5, nan="keep")
