"""A result has the same bytes on any number of ranks."""

import pytest
import torch
from kinds_of_recipes import RECIPES, tensors

from distprune.files import planning, pruning, verifying
from distprune.testing import run_ranks
from helpers import tiny_checkpoints
from helpers.recipes import raw_recipe
from helpers.sampling import every
from helpers.small_chunks import small_chunks
from helpers.tiny_checkpoints import tree_digest

RUN = ("distprune/report.json",)
MORE = {
    "limits": raw_recipe(0.5, min_sparsity=0.4, max_sparsity=0.6),
    "limits of rms": raw_recipe(0.5, normalize="rms", max_sparsity=0.8),
    "erk": raw_recipe(0.5, budget="erk"),
    "groups": raw_recipe(
        groups=(
            raw_recipe(0.5, include=("a*",), normalize="l2"),
            raw_recipe(0.25, "row", include=("b*",)),
            raw_recipe(0.75, include=("[cd]*",), score="random"),
        ),
        seed=5,
    ),
}


def digests_here(source, recipes, folder):
    """On every rank: the digest of each result, after a comparison with its source."""
    digests = []
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, 24)
        for number, recipe in enumerate(recipes):
            target = folder / str(number)
            pruning.prune(planning.plan(source, recipe), target)
            assert verifying.verify(target, source).problems == ()
            digests.append(tree_digest(target, RUN))
    return digests


def test_any_number_of_ranks_writes_the_same_bytes(tmp_path):
    """Those of one rank are compared with the oracle where each kind of recipe is tested."""
    whole = tensors([torch.bfloat16])
    whole["b.weight"] = whole["a.weight"].flip(0)
    parts = [{name: tensor} for name, tensor in whole.items()]
    source = tiny_checkpoints.save(tmp_path / "source", *parts)
    recipes, found = every(2, [*RECIPES.values(), *MORE.values()]), []
    for world_size in (1, 2, 3):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        found += run_ranks(digests_here, world_size, source, recipes, folder)
    assert all(digests == found[0] for digests in found)
