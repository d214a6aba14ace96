"""Masks by every score, scaled or not: of files as of models, bit for bit."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import distprune
from distprune import budgets
from distprune.files import planning, pruning
from distprune.files.errors import CheckpointError, NaNError
from distprune.files.mask_files import open_masks, read_keep
from distprune.files.statistics_file import StoredStatistics, WeightLayout, write_statistics
from distprune.files.verifying import verify
from distprune.recipes import Recipe
from distprune.schedule import ScheduledPruner
from distprune.statistics import ActivationStatistics, GradientStatistics
from distprune.testing import run_ranks
from helpers import tiny_checkpoints
from helpers.recipes import raw_recipe
from helpers.sampling import every
from helpers.small_chunks import small_chunks

Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
EXCLUDED = "layers.4"  # has no statistics
SELECTION = {
    "exclude": (f"{EXCLUDED}*", "*.bias"),
    "include": ("layers.*",),
    "input_dims": {"layers.1.weight": 0, "layers.3.weight": (1, 2)},
}


def masks_of(folder):
    masks = open_masks(folder)
    return {
        name: torch.from_numpy(
            read_keep(masks, name, 0, torch.Size(shape).numel()).reshape(shape).copy()
        )
        for name, shape in masks.shapes.items()
    }


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
    {"amount": 0.7, "normalize": "mean", "score": "magnitude"},
    {"amount": 0.5, "normalize": None, "score": "magnitude"},
    {"amount": 0.5, "normalize": "rms", "score": "magnitude", "max_sparsity": 0.6},
    {"amount": 0.5, "min_sparsity": 0.4, "max_sparsity": 0.6, "score": "random"},
    {"pattern": "1:2", "score": "random"},
    {"amount": 0.4, "normalize": "rms", "score": "wanda"},
    {"amount": 0.55, "normalize": "l2", "score": "stade"},
    {"amount": 0.5, "normalize": "rms", "score": "wanda", "min_sparsity": 0.4, "max_sparsity": 0.7},
    {"amount": 0.6, "scope": "row", "score": "stade"},
    {"pattern": "1:2", "score": "wanda"},
    {"amount": 0.5, "normalize": "rms", "score": "given"},
    {"amount": 0.5, "scope": "row", "score": "given"},
    {"amount": 0.5, "normalize": "rms", "score": "ria"},
    {"amount": 0.6, "normalize": None, "score": "ria", "max_sparsity": 0.8},
    {"amount": 0.5, "scope": "row", "score": "ria"},
    {"pattern": "1:2", "score": "ria"},
    {"amount": 0.5, "budget": "uniform", "score": "magnitude"},
    {"amount": 0.6, "budget": "erk", "score": "wanda", "max_sparsity": 0.9},
    {"amount": 0.5, "budget": "owl", "score": "wanda"},
    {"amount": 0.7, "budget": "owl", "score": "magnitude", "max_sparsity": 0.75},
    {"amount": 0.5, "budget": "owl", "score": "given"},
    {"amount": 0.4, "normalize": None, "score": "fisher"},
    {"amount": 0.5, "normalize": "rms", "score": "fisher"},
    {"amount": 0.5, "normalize": None, "min_sparsity": 0.4, "max_sparsity": 0.7, "score": "fisher"},
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
            recipe = raw_recipe(call.get("amount"), **SELECTION, **keywords)
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


@pytest.mark.filterwarnings("ignore:no token")
@pytest.mark.parametrize(
    "fields", [{"score": "ria", "scope": "row"}, {"score": "ria"}, {"budget": "owl"}], ids=str
)
def test_what_has_no_sum_is_named(tmp_path, fields):
    statistics = str(make_statistics(tmp_path / "statistics.safetensors"))
    recipe = raw_recipe(0.5, **fields, statistics=statistics, **SELECTION)
    state = {
        name: tensor.detach().clone()
        for name, tensor in make_model(torch.float32).state_dict().items()
    }
    for value, error in ((float("nan"), NaNError), (float("inf"), CheckpointError)):
        state["layers.2.weight"][1, 1] = value
        plan = planning.plan(tiny_checkpoints.save(tmp_path / str(value), state), recipe)
        with pytest.raises(error, match=r"layers\.2\.weight.*[Rr]epair"):
            pruning.prune(plan, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("keys", [{}, {"normalize": "none"}, {"budget": "erk"}], ids=str)
def test_a_recipe_is_one_of_files_and_of_models(tmp_path, keys):
    recipe = Recipe(sparsity=0.5, exclude=f"{EXCLUDED}*", include="*.weight", **keys)
    assert recipe.divisor == (None if keys else "rms")
    model = make_model(torch.float32)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    source = tiny_checkpoints.save(tmp_path / "source", state)
    pruning.prune(planning.plan(source, recipe), tmp_path / "target")
    ScheduledPruner.from_recipe(model, recipe).step()
    found = masks_of(tmp_path / "target")
    assert len(found) == 5
    for name, keep in found.items():
        assert model.get_submodule(name.removesuffix(".weight")).weight_mask.bool().equal(keep)


@pytest.mark.parametrize("value", [2.0**-1060, 1.5e308])
def test_fp64_that_cannot_be_divided_exactly_is_refused_by_name(tmp_path, value):
    weight = torch.full((3, 4), value, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 3, dtype=torch.float64))
    model[0].weight = nn.Parameter(weight.clone())
    text = r"0\.weight has too large or too small scores, so normalize='l2' has no meaning"
    with pytest.raises(ValueError, match=text):
        distprune.global_unstructured(
            distprune.select(model), distprune.L1Unstructured, amount=0.5, normalize="l2"
        )
    assert not hasattr(model[0], "weight_mask")
    source = tiny_checkpoints.save(tmp_path / "source", {"0.weight": weight})
    with pytest.raises(CheckpointError, match=text):
        pruning.prune(planning.plan(source, raw_recipe(0.5, normalize="l2")), tmp_path / "target")
