"""Fisher by factors of checkpoints: experts of their own tensors, and what is refused."""

import numpy as np
import pytest
import torch
from test_scores_from_statistics import (
    EXCLUDED,
    make_gradients,
    make_model,
    make_statistics,
    masks_of,
    stored_gradients,
)

from distprune.files import planning, pruning
from distprune.files.errors import CheckpointError, SelectionError
from distprune.files.statistics_file import StoredStatistics, WeightLayout, write_statistics
from helpers import tiny_checkpoints
from helpers.recipes import raw_recipe

E, INNER, H = 3, 10, 12
LAYER = "model.layers.0.mlp.experts"


@pytest.mark.parametrize("layout", ["experts", "transposed_experts"])
@pytest.mark.parametrize(
    "names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")], ids=["gate", "w1"]
)
def test_experts_of_their_own_tensors_have_the_scores_of_the_parameter(tmp_path, layout, names):
    """A gate comes before what it multiplies, as transformers concatenates them."""
    generator = torch.Generator().manual_seed(0)
    gate, up, down = (
        torch.randn(E, *shape, generator=generator)
        for shape in ((INNER, H), (INNER, H), (H, INNER))
    )
    merged = {f"{LAYER}.gate_up_proj": torch.cat([gate, up], 1), f"{LAYER}.down_proj": down}
    one_each = {
        f"{LAYER}.{expert}.{name}.weight": values[expert].clone()
        for name, values in zip(names, (gate, up, down), strict=True)
        for expert in range(E)
    }
    shapes = {name: value.shape for name, value in merged.items()}
    if layout == "transposed_experts":
        shapes = {name: (n, inputs, outputs) for name, (n, outputs, inputs) in shapes.items()}
    statistics = str(tmp_path / "statistics.safetensors")
    write_statistics(
        statistics,
        "gradients",
        {n: stored_gradients(WeightLayout(layout, s)) for n, s in shapes.items()},
    )
    for folder, state in (("merged", merged), ("one_each", one_each)):
        source = tiny_checkpoints.save(tmp_path / folder, state)
        recipe = raw_recipe(
            0.5, score="fisher", statistics=statistics, include=("*experts*",), input_dims={"*": -1}
        )
        pruning.prune(planning.plan(source, recipe), tmp_path / f"{folder}_pruned")
    whole, parts = (masks_of(tmp_path / f"{folder}_pruned") for folder in ("merged", "one_each"))
    for expert in range(E):
        first, second, last = (parts[f"{LAYER}.{expert}.{name}.weight"] for name in names)
        assert torch.cat([first, second]).equal(whole[f"{LAYER}.gate_up_proj"][expert])
        assert last.equal(whole[f"{LAYER}.down_proj"][expert])
    assert any(not keep.all() for keep in whole.values())


def plan_with(tmp_path, statistics, **more):
    state = {name: t.detach() for name, t in make_model(torch.float32).state_dict().items()}
    source = tmp_path / "source"
    if not source.exists():
        tiny_checkpoints.save(source, state)
    selection = {"include": ("layers.*",), "exclude": (f"{EXCLUDED}*", "*.bias")}
    return planning.plan(
        source,
        raw_recipe(
            0.5, statistics=statistics, input_dims={"layers.1.weight": 0}, **selection, **more
        ),
    )


def test_statistics_of_the_other_kind_are_refused(tmp_path):
    of_inputs = str(make_statistics(tmp_path / "inputs.safetensors"))
    of_gradients = make_gradients(tmp_path / "gradients.safetensors")
    with pytest.raises(CheckpointError, match="holds statistics of activations; expected those of"):
        plan_with(tmp_path, of_inputs, score="fisher")
    with pytest.raises(CheckpointError, match="holds statistics of gradients; expected those of"):
        plan_with(tmp_path, of_gradients, score="wanda")
    with pytest.raises(SelectionError, match="score fisher needs statistics of gradients and budg"):
        plan_with(tmp_path, of_gradients, score="fisher", budget="owl")
    with pytest.raises(SelectionError, match=r"score fisher needs statistics of gradients; .*FILE"):
        plan_with(tmp_path, None, score="fisher")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 0.0}, "has the count 0"),
        ({"count": float("nan")}, "has the count nan"),
        ({"first": np.ones(9)}, "has sums of the shapes"),
        ({"second": -np.ones(12)}, "not finite or negative"),
        ({"second": np.full(12, np.inf)}, "not finite or negative"),
        ({"layout": WeightLayout("unknown", (10, 12))}, "malformed"),
    ],
)
def test_malformed_statistics_are_refused(tmp_path, change, message):
    of_one = StoredStatistics(**vars(stored_gradients(WeightLayout("linear", (10, 12)))) | change)
    path = str(tmp_path / "gradients.safetensors")
    write_statistics(path, "gradients", {"layers.0.weight": of_one})
    with pytest.raises((CheckpointError, SelectionError), match=message):
        plan_with(tmp_path, path, score="fisher")
