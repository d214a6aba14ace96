"""Masks by every score, scaled or not: of files as of models, bit for bit."""

import warnings

import numpy as np
import pytest
import torch
from test_meets_the_library import masks_of
from torch import nn

import distprune
from distprune import budgets
from distprune.files import planning, pruning
from distprune.files.statistics_file import StoredStatistics, WeightLayout, write_statistics
from distprune.files.verifying import verify
from distprune.statistics import ActivationStatistics, GradientStatistics
from distprune.testing import run_ranks
from helpers import tiny_checkpoints
from helpers.recipes import raw_recipe
from helpers.sampling import every
from helpers.small_chunks import small_chunks

Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
EXCLUDED = "layers.4"  # has no statistics


def make_model(dtype):
    torch.manual_seed(0)
    layers = [
        nn.Linear(12, 10),
        Conv1D(6, 12),  # [in, out]
        nn.Conv2d(4, 6, 3, groups=2),
        nn.Conv1d(4, 8, 2),
        nn.Linear(5, 7),
        nn.Linear(20, 6),
    ]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    for which, layer in enumerate(layers):
        values = (torch.randn_like(layer.weight) * 8).round() / 4 * 3.0 ** (2 - which)
        mixed = torch.float32 if which % 2 else torch.bfloat16
        layer.weight = nn.Parameter(values.to(mixed if dtype == "mixed" else dtype))
    return model


def selected(model):
    return distprune.select(model, exclude=f"{EXCLUDED}*")


def layout_of(module, name):
    kinds = {nn.Linear: "linear", Conv1D: "conv1d_of_transformers"}
    groups = getattr(module, "groups", 1)
    return WeightLayout(kinds.get(type(module), "convolution"), tuple(module.weight.shape), groups)


def make_statistics(path, prefix=""):
    """Random statistics; no token came to the last layer."""
    torch.manual_seed(1)
    parameters = {}
    for pair in selected(make_model(torch.float32)):
        of_one = layout_of(*pair)
        sums, squares = torch.randn(2, *of_one.input_shape, dtype=torch.float64).numpy()
        squares = squares**2 * 40 + sums**2 / 300
        num_tokens = 300
        if pair.fqn.startswith("layers.5"):
            num_tokens, sums, squares = 0, sums * 0, squares * 0
        parameters[prefix + pair.fqn] = StoredStatistics(of_one, num_tokens, sums, squares)
    write_statistics(path, "one_pass", parameters)
    return path


def stored_gradients(layout):
    draws = np.random.default_rng([0, *layout.shape])
    by_output, by_input = draws.random(layout.num_outputs), draws.random(layout.input_shape)
    by_output[0] = 0
    return StoredStatistics(layout, 6.0, by_output, by_input, of_gradients=True)


def make_gradients(path):
    """Random sums; the gradients of the last layer are all zero."""
    parameters = {}
    for pair in selected(make_model(torch.float32)):
        of_one = stored_gradients(layout_of(*pair))
        if pair.fqn.startswith("layers.5"):
            of_one.first[:], of_one.second[:] = 0, 0
        parameters[pair.fqn] = of_one
    write_statistics(path, "gradients", parameters)
    return str(path)


CALLS = [
    {"amount": 0.4, "normalize": "rms", "score": "magnitude"},
    {"amount": 0.55, "normalize": "l2", "score": "magnitude"},
    {"amount": 0.7, "normalize": "mean", "score": "magnitude"},
    {"amount": 0.5, "normalize": None, "score": "magnitude"},
    {"amount": 0.5, "normalize": "rms", "score": "magnitude", "max_sparsity": 0.6},
    {"amount": 0.513, "min_sparsity": 0.25, "max_sparsity": 0.55, "score": "magnitude"},
    {"amount": 0.5, "min_sparsity": 0.4, "max_sparsity": 0.6, "score": "random"},
    {"amount": 0.5, "scope": "row", "score": "random"},
    {"pattern": "1:2", "score": "random"},
    {"amount": 0.3, "scope": "layer", "score": "magnitude"},
    {"pattern": "1:2", "score": "magnitude"},
    {"amount": 0.4, "normalize": "rms", "score": "wanda"},
    {"amount": 0.6, "normalize": "mean", "score": "wanda"},
    {"amount": 0.5, "normalize": None, "score": "wanda"},
    {"amount": 0.55, "normalize": "l2", "score": "stade"},
    {"amount": 0.5, "normalize": "rms", "score": "wanda", "min_sparsity": 0.4, "max_sparsity": 0.7},
    {"amount": 0.3, "scope": "layer", "score": "wanda"},
    {"amount": 0.5, "scope": "row", "score": "wanda"},
    {"amount": 0.6, "scope": "row", "score": "stade"},
    {"pattern": "1:2", "score": "wanda"},
    {"amount": 0.5, "normalize": "rms", "score": "given"},
    {"amount": 0.5, "normalize": None, "score": "given"},
    {"amount": 0.5, "scope": "row", "score": "given"},
    {"amount": 0.5, "normalize": "rms", "score": "ria"},
    {"amount": 0.6, "normalize": None, "score": "ria", "max_sparsity": 0.8},
    {"amount": 0.5, "scope": "row", "score": "ria"},
    {"amount": 0.3, "scope": "layer", "score": "ria"},
    {"pattern": "1:2", "score": "ria"},
    {"amount": 0.5, "budget": "uniform", "score": "magnitude"},
    {"amount": 0.5, "budget": "uniform", "score": "given"},
    {"amount": 0.6, "budget": "erk", "score": "wanda", "max_sparsity": 0.9},
    {"amount": 0.4, "budget": "erk", "score": "magnitude"},
    {"amount": 0.5, "budget": "owl", "score": "wanda"},
    {"amount": 0.7, "budget": "owl", "score": "magnitude", "max_sparsity": 0.75},
    {"amount": 0.6, "budget": "owl", "score": "ria"},
    {"amount": 0.5, "budget": "owl", "score": "given"},
    {"amount": 0.4, "normalize": None, "score": "fisher"},
    {"amount": 0.5, "normalize": "rms", "score": "fisher"},
    {"amount": 0.5, "normalize": None, "min_sparsity": 0.4, "max_sparsity": 0.7, "score": "fisher"},
    {"amount": 0.3, "scope": "layer", "score": "fisher"},
    {"amount": 0.5, "scope": "row", "score": "fisher"},
    {"pattern": "1:2", "score": "fisher"},
    {"amount": 0.6, "budget": "erk", "score": "fisher"},
]


def needs_statistics(call):
    return call["score"] in ("wanda", "stade", "ria") or call.get("budget") == "owl"


def given_scores(model, dtype):
    """Some of them negative: their absolute values are ranked."""
    torch.manual_seed(2)
    return {
        pair.fqn: (torch.randn(pair[0].weight.shape) * 4).round().to(dtype)
        for pair in selected(model)
    }


def masks_of_model(calls, dtype, statistics, gradients, scores_dtype):
    """In the library: the masks of each call, by name."""
    found = []
    for call in calls:
        model = make_model(dtype)
        parameters = selected(model)
        keywords = {name: value for name, value in call.items() if name != "score"}
        collected = ActivationStatistics.load(statistics, parameters)
        scores = None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no token")
            if (budget := keywords.pop("budget", None)) is not None:
                more = {"ratios": collected.outlier_ratios()} if budget == "owl" else {}
                make, bounds = getattr(budgets, budget), {}
                if "max_sparsity" in keywords:
                    bounds["max_sparsity"] = keywords.pop("max_sparsity")
                keywords["amount"] = make(parameters, keywords["amount"], **more, **bounds)
            warnings.filterwarnings("ignore", "all gradients are zero of layers.5.weight")
            if call["score"] in ("wanda", "stade", "ria"):
                scores = getattr(collected, call["score"])()
            if call["score"] == "fisher":
                scores = GradientStatistics.load(gradients, parameters).fisher()
        if call["score"] == "given":
            given = given_scores(make_model(dtype), scores_dtype)
            scores = {pair: given[pair.fqn] for pair in parameters}
        method = distprune.L1Unstructured
        if call["score"] == "random":
            method = distprune.RandomUnstructured
            torch.manual_seed(3)
        distprune.global_unstructured(parameters, method, importance_scores=scores, **keywords)
        found.append({pair.fqn: pair[0].weight_mask.bool() for pair in parameters})
    return found


def prune_files(source, folder, calls, statistics, gradients, scores, chunk):
    """On every rank."""
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, chunk)
        for number, call in enumerate(calls):
            keywords = {name: value for name, value in call.items() if name != "amount"}
            if call["score"] == "given":
                keywords["scores"] = scores
            if call["score"] == "random":
                keywords["seed"] = 3
            if needs_statistics(call):
                keywords["statistics"] = statistics
            if call["score"] == "fisher":
                keywords["statistics"] = gradients
            keywords = {key: value for key, value in keywords.items() if value is not None}
            recipe = raw_recipe(
                call.get("amount"),
                exclude=(f"{EXCLUDED}*", "*.bias"),
                include=("layers.*",),
                input_dims={"layers.1.weight": 0, "layers.3.weight": (1, 2)},
                **keywords,
            )
            plan = planning.plan(source, recipe)
            warned = " ".join(plan.warnings)
            assert ("no token" in warned) == needs_statistics(call)
            assert ("all gradients are zero of layers.5" in warned) == (call["score"] == "fisher")
            pruning.prune(plan, folder / str(number))


def check(source, folder, inputs, wanted, ranks, chunk):
    folder.mkdir()
    run_ranks(prune_files, ranks, source, folder, *inputs, chunk)
    for number, masks in enumerate(wanted):
        found = masks_of(folder / str(number))
        assert found.keys() == masks.keys()
        wrong = [name for name, keep in masks.items() if not found[name].equal(keep)]
        assert not wrong, inputs[0][number]


DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float64, torch.float16),
    ("mixed", torch.float64),
]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "scores_dtype"), every(2, DTYPES, 1))
def test_masks_of_the_model_and_of_its_checkpoint(tmp_path, dtype, scores_dtype):
    model = make_model(dtype)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    source = tiny_checkpoints.save(tmp_path / "source", state)
    statistics = str(make_statistics(tmp_path / "statistics.safetensors"))
    gradients = make_gradients(tmp_path / "gradients.safetensors")
    scores = str(tiny_checkpoints.save(tmp_path / "scores", given_scores(model, scores_dtype)))
    calls = every(4, CALLS, [scores for _, scores in DTYPES].index(scores_dtype))
    wanted = masks_of_model(calls, dtype, statistics, gradients, scores_dtype)
    assert all(sum(int((~keep).sum()) for keep in masks.values()) > 0 for masks in wanted)
    inputs = (calls, statistics, gradients, scores)
    check(source, tmp_path / "one", inputs, wanted, 1, chunk=1 << 19)
    check(source, tmp_path / "three", inputs, wanted, 3, chunk=24)
    for number, call in enumerate(calls):
        given = scores if call["score"] == "given" else None
        result = verify(tmp_path / "three" / str(number), source, scores=given)
        assert not result.problems, (call, result.problems)
