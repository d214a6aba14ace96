"""Masks by every score, scaled or not: of files as of models, bit for bit."""

import os
import shutil
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import distprune
from distprune import budgets
from distprune.files import planning, pruning
from distprune.files.errors import CheckpointError, NaNError, SelectionError
from distprune.files.statistics_file import StoredStatistics, WeightLayout, write_statistics
from distprune.files.verifying import verify
from distprune.recipes import Recipe, load_recipe
from distprune.schedule import ScheduledPruner
from distprune.statistics import ActivationStatistics, GradientStatistics
from distprune.testing import run_ranks
from helpers import file_oracle
from helpers.recipes import raw_recipe
from helpers.sampling import every
from helpers.small_chunks import small_chunks
from helpers.tiny_checkpoints import load, save, tree_digest

Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
EXCLUDED = "layers.4"  # has no statistics
SELECTION = {
    "exclude": (f"{EXCLUDED}*", "*.bias"),
    "include": ("layers.*",),
    "input_dims": {"layers.1.weight": 0, "layers.3.weight": (1, 2)},
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
        file_oracle.check(source, folder / str(number), masks, load)


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
    source = save(tmp_path / "source", model.state_dict())
    statistics = str(make_statistics(tmp_path / "statistics.safetensors"))
    gradients = make_gradients(tmp_path / "gradients.safetensors")
    scores = str(save(tmp_path / "scores", given_scores(model, scores_dtype)))
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
    state = make_model(torch.float32).state_dict()
    for value, error in ((float("nan"), NaNError), (float("inf"), CheckpointError)):
        state["layers.2.weight"][1, 1] = value
        plan = planning.plan(save(tmp_path / str(value), state), recipe)
        with pytest.raises(error, match=r"layers\.2\.weight.*[Rr]epair"):
            pruning.prune(plan, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("keys", [{}, {"normalize": "none"}, {"budget": "erk"}], ids=str)
def test_a_recipe_is_one_of_files_and_of_models(tmp_path, keys):
    recipe = Recipe(sparsity=0.5, exclude=f"{EXCLUDED}*", include="*.weight", **keys)
    assert recipe.divisor == (None if keys else "rms")
    model = make_model(torch.float32)
    source = save(tmp_path / "source", model.state_dict())
    pruning.prune(planning.plan(source, recipe), tmp_path / "target")
    ScheduledPruner.from_recipe(model, recipe).step()
    masks = {n.removesuffix("_mask"): mask.bool() for n, mask in model.named_buffers()}
    assert len(masks) == 5
    file_oracle.check(source, tmp_path / "target", masks, load)


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
    source = save(tmp_path / "source", {"0.weight": weight})
    with pytest.raises(CheckpointError, match=text):
        pruning.prune(planning.plan(source, raw_recipe(0.5, normalize="l2")), tmp_path / "target")


# Statistics and given scores: whose they are, what is refused, and what a result keeps of them.


RUN = ("distprune/report.json",)
NAMES = [f"model.layers.{n}.fc.weight" for n in range(4)]


def weights():
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(16, 24, generator=g) for name in NAMES}


@pytest.fixture
def source(tmp_path):
    return save(tmp_path / "source", weights())


def write(path, names=NAMES, shape=(16, 24), num_tokens=100, layout="linear", factor=1.0):
    draws = np.random.default_rng(0)
    parameters = {}
    for name in names:
        weight = WeightLayout(layout, shape)
        sums, squares = draws.random((2, *weight.input_shape)) * 50 * factor
        parameters[name] = StoredStatistics(weight, num_tokens, sums, squares)
    write_statistics(path, "sequential", parameters)
    return str(path)


@pytest.fixture
def statistics(tmp_path):
    return write(tmp_path / "statistics.safetensors")


@pytest.fixture
def scores(tmp_path):
    g = torch.Generator().manual_seed(1)
    return save(tmp_path / "scores", {name: torch.randn(16, 24, generator=g) for name in NAMES})


def wanda(statistics, **more):
    return raw_recipe(0.5, score="wanda", statistics=statistics, **more)


def test_a_result_is_verified_without_the_original_statistics(source, statistics, tmp_path):
    target = tmp_path / "target"
    report = pruning.prune(planning.plan(source, wanda(statistics, normalize="rms")), target)
    kept = target / "distprune" / "statistics.safetensors"
    with open(statistics, "rb") as file:
        assert kept.read_bytes() == file.read()
    assert report.inputs["statistics"]["mode"] == "sequential"
    assert report.inputs["statistics"]["count"] == 100
    assert len(report.inputs["statistics"]["sha256"]) == 64
    card = (target / "README.md").read_text()
    assert "score: wanda" in card.replace('"', "")
    assert str(tmp_path) not in card + (target / "distprune" / "recipe.yaml").read_text()
    os.remove(statistics)
    shutil.move(target, tmp_path / "moved")
    moved = tmp_path / "moved"
    assert verify(moved, source).is_good
    again = load_recipe(moved / "distprune" / "recipe.yaml")
    pruning.prune(planning.plan(source, again), tmp_path / "again")
    assert tree_digest(tmp_path / "again", RUN) == tree_digest(moved, RUN)
    write(moved / "distprune" / "statistics.safetensors", factor=np.linspace(0.01, 1, 24))
    assert not verify(moved, source).is_good


def test_given_scores_are_needed_again_to_verify(source, scores, tmp_path):
    target = tmp_path / "target"
    recipe = raw_recipe(0.5, score="given", scores=str(scores))
    pruning.prune(planning.plan(source, recipe), target)
    assert str(tmp_path) not in (target / "distprune" / "report.json").read_text()
    with pytest.raises(CheckpointError, match="--scores"):
        verify(target, source)
    copy = shutil.copytree(scores, tmp_path / "copy", copy_function=shutil.copyfile)
    assert verify(target, source, scores=copy).is_good
    other = weights()
    other[NAMES[0]] = -other[NAMES[0]] + 1
    assert not verify(target, source, scores=save(tmp_path / "other", other)).is_good


@pytest.mark.parametrize("kind", ["statistics", "scores"])
def test_a_run_continues_with_the_same_inputs_only(
    source, statistics, scores, tmp_path, monkeypatch, kind
):
    recipe = wanda(statistics, normalize="rms")
    if kind == "scores":
        recipe = raw_recipe(0.5, score="given", scores=str(scores))
    plan = planning.plan(source, recipe)
    pruning.prune(plan, tmp_path / "whole")
    target = tmp_path / "target"
    with monkeypatch.context() as patch:
        patch.setattr(pruning, "check_unchanged", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pruning.prune(plan, target)
    copied = tmp_path / "elsewhere.safetensors"
    if kind == "statistics":  # another path, but the same bytes
        shutil.copyfile(statistics, copied)
        plan = planning.plan(source, wanda(str(copied), normalize="rms"))
    said = []
    pruning.prune(plan, target, tell=said.append)
    assert "Resuming" in said[0]
    assert tree_digest(target, RUN) == tree_digest(tmp_path / "whole", RUN)
    if kind == "statistics":
        changed = wanda(write(copied, factor=2.0), normalize="rms")
    else:
        file = scores / "model.safetensors"
        os.utime(file, ns=(0, 12345))
        changed = recipe
    assert planning.plan(source, changed).digest != plan.digest


def problems_of(*arguments, plan=planning.plan):
    with pytest.raises(SelectionError) as error:
        plan(*arguments)
    return str(error.value)


def test_tensors_without_statistics_are_named(source, tmp_path):
    path = write(tmp_path / "some.safetensors", NAMES[:2])
    text = problems_of(source, wanda(path))
    assert f"no statistics of {NAMES[2]}, but of {NAMES[0]}" in text
    assert "exclude the tensor" in text
    assert planning.plan(source, wanda(path, exclude=("*.2.*", "*.3.*"))).num_elements == 768


def test_statistics_of_another_weight_are_refused(source, tmp_path):
    path = write(tmp_path / "a.safetensors", shape=(24, 16))
    assert f"{NAMES[0]} has the shape [16, 24]" in problems_of(source, wanda(path))
    path = write(tmp_path / "b.safetensors", layout="conv1d_of_transformers")
    text = problems_of(source, wanda(path, scope="row"))
    assert "inputs are along the dimensions [0]" in text and "input_dims" in text
    assert planning.plan(source, wanda(path, scope="row", input_dims={"*": 0})).num_to_prune


def test_statistics_of_no_token_are_a_warning(source, tmp_path):
    path = write(tmp_path / "more.safetensors", [*NAMES, "model.other.weight"], num_tokens=0)
    (text,) = planning.plan(source, wanda(path)).warnings
    assert f"no token came to {NAMES[0]}" in text and "matrices): these are ranked by" in text


def test_scores_that_do_not_fit_are_named(source, tmp_path):
    right = {name: torch.ones(16, 24) for name in NAMES}
    cases = {
        "F32 [24, 16] of": right | {NAMES[1]: torch.ones(24, 16)},
        "I64 [16, 24] of": right | {NAMES[1]: torch.ones(16, 24, dtype=torch.int64)},
        "has no scores of": {name: right[name] for name in NAMES if name != NAMES[1]},
    }
    for number, (text, wrong) in enumerate(cases.items()):
        scores = save(tmp_path / str(number), wrong)
        found = problems_of(source, raw_recipe(0.5, score="given", scores=scores))
        assert text in found and NAMES[1] in found


def test_a_plan_counts_the_bytes_of_scores_that_are_still_to_be_made(tmp_path):
    """They have 32 bits, whatever the weights have."""
    source = save(tmp_path / "source", {n: value.bfloat16() for n, value in weights().items()})
    recipe = raw_recipe(0.5, score="taylor")
    made = planning.plan(source, recipe, awaits_statistics=True)
    assert planning.bytes_to_count(made) == 4 * made.num_elements


@pytest.mark.parametrize("more", [{}, {"normalize": "rms"}, {"scope": "row"}, {"scope": "layer"}])
def test_nan_and_infinities(source, tmp_path, more):
    values = weights()
    values[NAMES[1]][2, 3] = float("nan")
    scores = save(tmp_path / "scores", values)
    recipe = raw_recipe(0.5, score="given", scores=scores, **more)
    with pytest.raises(NaNError, match=f"NaN in the scores of {NAMES[1]};.*Repair"):
        pruning.prune(planning.plan(source, recipe), tmp_path / "target")
    if more == {"normalize": "rms"}:
        values[NAMES[1]][2, 3] = float("inf")
        recipe = raw_recipe(0.5, score="given", scores=save(tmp_path / "inf", values), **more)
        with pytest.raises(CheckpointError, match=f"{NAMES[1]} has infinite scores"):
            pruning.prune(planning.plan(source, recipe), tmp_path / "target")


def test_inputs_that_change_during_a_run_are_noticed(source, statistics, tmp_path):
    plan = planning.plan(source, wanda(statistics))
    write(statistics, factor=3.0)
    with pytest.raises(CheckpointError, match="has changed"):
        pruning.prune(plan, tmp_path / "target")
    assert not (tmp_path / "target").exists()


E, INNER, H = 3, 10, 12
LAYER = "model.layers.0.mlp.experts"
GATE_UP, DOWN = (E, 2 * INNER, H), (E, H, INNER)


def stored(shape, layout="experts", counts=(5, 9, 2)):
    draws = np.random.default_rng(shape[1])
    weight = WeightLayout(layout, shape)
    sums, squares = draws.random((2, *weight.input_shape)) * 50
    return StoredStatistics(weight, counts, sums, squares)


def fused(stem=LAYER, **changes):
    return {
        f"{stem}.gate_up_proj": stored(GATE_UP, **changes),
        f"{stem}.down_proj": stored(DOWN, **changes),
    }


def separate(stem=LAYER, num_experts=E, hidden=INNER):
    g = torch.Generator().manual_seed(0)
    shapes = {"gate_proj": (hidden, H), "up_proj": (hidden, H), "down_proj": (H, hidden)}
    return {
        f"{stem}.{expert}.{own}.weight": torch.randn(shape, generator=g)
        for expert in range(num_experts)
        for own, shape in shapes.items()
    }


def plan_of(tmp_path, tensors, statistics, **more):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    source = save(folder / "source", tensors)
    write_statistics(folder / "statistics", "one_pass", statistics)
    recipe = raw_recipe(0.5, score="wanda", statistics=str(folder / "statistics"), **more)
    return planning.plan(source, recipe)


def test_a_gate_without_a_partner_is_all_of_its_parameter(tmp_path):
    """As of Nemotron-H, whose experts have no gate."""
    tensors = {n: t for n, t in separate().items() if "gate" not in n}
    statistics = {f"{LAYER}.up_proj": stored((E, INNER, H)), f"{LAYER}.down_proj": stored(DOWN)}
    assert len(plan_of(tmp_path, tensors, statistics).statistics.of_tensor) == 6
    statistics[f"{LAYER}.up_proj"] = stored(GATE_UP)
    text = problems_of(tmp_path, tensors, statistics, plan=plan_of)
    assert f"{LAYER}.0.up_proj.weight has the shape" in text


@pytest.mark.parametrize("kind", ["experts", "hidden", "layout"])
def test_statistics_of_other_experts_are_refused_by_name(tmp_path, kind):
    tensors, statistics = separate(), fused()
    if kind == "experts":
        tensors = separate(num_experts=4)
    elif kind == "hidden":
        tensors = separate(hidden=INNER // 2)
    else:
        linear = StoredStatistics(WeightLayout("linear", GATE_UP[1:]), 5, np.ones(H), np.ones(H))
        statistics[f"{LAYER}.gate_up_proj"] = linear
    text = problems_of(tmp_path, tensors, statistics, plan=plan_of)
    assert f"{LAYER}.{3 if kind == 'experts' else 0}." in text and "has the shape" in text


def test_experts_that_saw_no_token_are_named(tmp_path):
    (warning,) = plan_of(tmp_path, separate(), fused(counts=(5, 0, 2))).warnings
    assert warning.startswith(f"no token came to {LAYER}.1.down_proj.weight, {LAYER}.1.gate_proj")
    whole = {f"{LAYER}.gate_up_proj": torch.ones(GATE_UP), f"{LAYER}.down_proj": torch.ones(DOWN)}
    (warning,) = plan_of(tmp_path, whole, fused(counts=(5, 0, 0))).warnings
    assert f"no token came to {LAYER}.down_proj (experts 1, 2), {LAYER}.gate_up_proj" in warning
    assert "(4 of 6 matrices)" in warning
    (warning,) = plan_of(tmp_path, whole, fused(counts=(0, 0, 0))).warnings
    assert f"no token came to {LAYER}.down_proj, {LAYER}.gate_up_proj (6" in warning


def plan_with(tmp_path, statistics, **more):
    source = tmp_path / "source"
    if not source.exists():
        save(source, make_model(torch.float32).state_dict())
    return planning.plan(source, raw_recipe(0.5, statistics=statistics, **SELECTION, **more))


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
