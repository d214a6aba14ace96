"""One recipe of every kind, and weights that each of them can prune."""

import torch

from helpers.recipes import raw_recipe

RECIPES = {
    "global": raw_recipe(0.5),
    "normalised": raw_recipe(0.5, normalize="rms"),
    "layer": raw_recipe(0.5, "layer"),
    "row": raw_recipe(0.4, "row"),
    "pattern": raw_recipe(pattern="2:4"),
    "random": raw_recipe(0.5, score="random", seed=3),
    "random rows": raw_recipe(0.5, "row", score="random"),
    "nothing": raw_recipe(0.0),
    "everything": raw_recipe(1.0),
    "chosen": raw_recipe(0.3, include=("re:.*[abc].weight",), exclude=("b.*",)),
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
