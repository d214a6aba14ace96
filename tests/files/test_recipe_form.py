"""Recipes have one form: what the Python API writes, ``-r`` and ``load_recipe`` read again."""

import json
from dataclasses import asdict

import pytest
import torch

from distprune.files import planning, pruning
from distprune.files.recipe import FileRecipe
from distprune.recipe import load_recipe
from distprune.recipes.checkpoints import load_file_recipe
from helpers import tiny_checkpoints

yaml = pytest.importorskip("yaml")
RECIPES = [
    FileRecipe(0.5),
    FileRecipe(1e-5, include=("re:a\\.b", "*"), exclude=('"quoted": #', "x: {y}"), min_ndim=1),
    FileRecipe(1, scope="layer", score="random", nan="keep", masks=False),
    FileRecipe(0.5, "row", include=("ü*", "\U0001f600*", "caf\udce9", "tab\t\x7f\x85\u2028")),
    FileRecipe(pattern="4:8", score="random", seed=2**40),
    FileRecipe(0.5, min_sparsity=1e-5, max_sparsity=0.9),
    FileRecipe(
        seed=3,
        nan="keep",
        masks=False,
        groups=(
            FileRecipe(0.5, include=("*attn*",), max_sparsity=0.75),
            FileRecipe(0.25, "row", score="random", exclude=("a", "b"), min_ndim=1),
            FileRecipe(pattern="2:4", include=("*mlp*",)),
            FileRecipe(0.0, "layer", include=("c",)),
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_written_is_read_again(recipe, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    assert load_file_recipe(path) == recipe
    assert load_recipe(path).groups[0].method == recipe.parts[0].score
    assert FileRecipe(**json.loads(json.dumps(asdict(recipe)))) == recipe  # as in a report
    assert yaml.safe_load(recipe.to_yaml()) == json.loads(json.dumps(recipe.as_mapping()))


def test_the_recipe_beside_a_result_makes_the_same_plan(tmp_path):
    source = tiny_checkpoints.save(
        tmp_path / "source", {"a.weight": torch.arange(1.0, 65).reshape(8, 8)}
    )
    plan = planning.plan(source, FileRecipe(0.3, "layer", include=("a*",)))
    pruning.prune(plan, tmp_path / "out")
    again = load_file_recipe(tmp_path / "out" / "distprune" / "recipe.yaml")
    assert planning.plan(source, again) == plan
