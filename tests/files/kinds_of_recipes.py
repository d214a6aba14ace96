"""One recipe of every kind, and weights that each of them can prune."""

import torch

from distprune.files.recipe import FileRecipe

RECIPES = {
    "global": FileRecipe(0.5),
    "normalised": FileRecipe(0.5, normalize="rms"),
    "layer": FileRecipe(0.5, "layer"),
    "row": FileRecipe(0.4, "row"),
    "pattern": FileRecipe(pattern="2:4"),
    "random": FileRecipe(0.5, score="random", seed=3),
    "random rows": FileRecipe(0.5, "row", score="random"),
    "nothing": FileRecipe(0.0),
    "everything": FileRecipe(1.0),
    "chosen": FileRecipe(0.3, include=("re:.*[abc].weight",), exclude=("b.*",), nan="keep"),
}


def tensors(dtypes):
    g = torch.Generator().manual_seed(0)
    shapes = {"a": (5, 12), "b": (12, 5), "c": (3, 20), "d": (5, 12)}
    if len(dtypes) == 1:
        shapes["b"] = (15, 4)
    made = {}
    for (name, shape), dtype in zip(shapes.items(), dtypes * 4, strict=False):
        values = (torch.randn(shape, generator=g) * 3).round()
        made[f"{name}.weight"] = (values + values.sign() * 0.25).to(dtype)
    made["norm.weight"] = torch.ones(7)
    return made
