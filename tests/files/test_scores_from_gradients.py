"""Masks by Fisher by factors: the command line's are the model's, bit for bit."""

import warnings

import numpy as np
import pytest
import torch
from test_meets_the_library import masks_of
from test_scores_from_statistics import EXCLUDED, Conv1D, make_model, make_statistics, selected
from torch import nn

import distprune
from distprune.files import planning, pruning
from distprune.files.checkpoints.statistics_file import (
    StoredGradients,
    WeightLayout,
    write_gradient_statistics,
)
from distprune.files.errors import CheckpointError, SelectionError
from distprune.files.recipe import FileRecipe
from distprune.files.verifying import verify
from distprune.statistics import GradientStatistics
from distprune.testing import run_ranks
from helpers import tiny_checkpoints
from helpers.small_work_units import small_chunks, small_units

CALLS = [
    {"amount": 0.4, "normalize": None},
    {"amount": 0.5, "normalize": "rms"},
    {"amount": 0.5, "normalize": None, "min_sparsity": 0.4, "max_sparsity": 0.7},
    {"amount": 0.3, "scope": "layer"},
    {"amount": 0.5, "scope": "row"},
    {"pattern": "1:2"},
    {"amount": 0.4, "pattern": "2x2"},
    {"amount": 0.6, "budget": "erk"},
]


def stored(layout, shape, groups=1, seed=0, weight=6.0):
    draws = np.random.default_rng([seed, *shape])
    sizes = WeightLayout(layout, tuple(shape), groups)
    by_output, by_input = draws.random(sizes.num_outputs), draws.random(sizes.input_shape)
    by_output[0] = 0
    return StoredGradients(sizes, weight, by_output, by_input)


def make_gradients(path):
    """Random sums; the gradients of the last layer are all zero."""
    parameters = {}
    for pair in selected(make_model(torch.float32)):
        module, weight = pair[0], pair[0].weight
        layout = {nn.Linear: "linear", Conv1D: "conv1d_of_transformers"}.get(
            type(module), "convolution"
        )
        of_one = stored(layout, weight.shape, getattr(module, "groups", 1))
        if pair.fqn.startswith("layers.5"):
            of_one.by_output[:], of_one.by_input[:] = 0, 0
        parameters[pair.fqn] = of_one
    write_gradient_statistics(path, parameters)
    return str(path)


def masks_of_model(dtype, statistics):
    found = []
    for call in CALLS:
        parameters = selected(make_model(dtype))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "all gradients are zero of layers.5.weight")
            scores = GradientStatistics.load(statistics, parameters).fisher()
        distprune.global_unstructured(parameters, distprune.L1Unstructured, scores, **call)
        found.append({pair.fqn: pair[0].weight_mask.bool() for pair in parameters})
    return found


@small_units(num_elements=44)
def prune_files(source, folder, statistics, chunk):
    """On every rank."""
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, chunk, 8 * chunk)
        for number, call in enumerate(CALLS):
            recipe = FileRecipe(
                call.get("amount"),
                exclude=(f"{EXCLUDED}*", "*.bias"),
                include=("layers.*",),
                input_dims={"layers.1.weight": 0},
                score="fisher",
                statistics=statistics,
                **{name: value for name, value in call.items() if name != "amount"},
            )
            plan = pruning.plan_together(source, recipe)
            assert "all gradients are zero of layers.5.weight" in " ".join(plan.warnings)
            pruning.prune(plan, folder / str(number))


@pytest.mark.filterwarnings("ignore:the ranking over all parameters")
@pytest.mark.parametrize(
    ("dtype", "ranks", "chunk"),
    [(torch.bfloat16, 1, 1 << 19), ("mixed", 3, 24), (torch.float64, 2, 24)],
)
def test_masks_of_the_model_and_of_its_checkpoint(tmp_path, dtype, ranks, chunk):
    state = {name: tensor.detach() for name, tensor in make_model(dtype).state_dict().items()}
    source = tiny_checkpoints.save(tmp_path / "source", state)
    statistics = make_gradients(tmp_path / "statistics.safetensors")
    (tmp_path / "pruned").mkdir()
    run_ranks(prune_files, ranks, source, tmp_path / "pruned", statistics, chunk)
    for number, masks in enumerate(masks_of_model(dtype, statistics)):
        found = masks_of(tmp_path / "pruned" / str(number))
        assert found.keys() == masks.keys()
        wrong = [name for name, keep in masks.items() if not found[name].equal(keep)]
        assert not wrong, CALLS[number]
        assert any(not keep.all() for keep in masks.values())
    assert not verify(tmp_path / "pruned" / "0", source).problems


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
    write_gradient_statistics(
        statistics, {name: stored(layout, shape) for name, shape in shapes.items()}
    )
    for folder, state in (("merged", merged), ("one_each", one_each)):
        source = tiny_checkpoints.save(tmp_path / folder, state)
        recipe = FileRecipe(
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
        FileRecipe(
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
        ({"weight": 0.0}, "the weights of all batches of layers.0.weight are 0"),
        ({"weight": float("nan")}, "NaN is not JSON"),
        ({"by_output": np.ones(9)}, "has sums of shape"),
        ({"by_input": -np.ones(12)}, "not finite or negative"),
        ({"by_input": np.full(12, np.inf)}, "not finite or negative"),
        ({"layout": WeightLayout("unknown", (10, 12))}, "are malformed"),
    ],
)
def test_malformed_statistics_are_refused(tmp_path, change, message):
    of_one = StoredGradients(**vars(stored("linear", (10, 12))) | change)
    path = str(tmp_path / "gradients.safetensors")
    write_gradient_statistics(path, {"layers.0.weight": of_one})
    with pytest.raises((CheckpointError, SelectionError), match=message):
        plan_with(tmp_path, path, score="fisher")
