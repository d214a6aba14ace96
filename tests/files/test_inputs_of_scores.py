"""Statistics and given scores: whose they are, what is refused, and what a result keeps of them."""

import os
import shutil

import numpy as np
import pytest
import torch

from distprune.files import planning, pruning
from distprune.files.errors import CheckpointError, NaNError, SelectionError
from distprune.files.statistics_file import StoredStatistics, WeightLayout, write_statistics
from distprune.files.verifying import verify
from distprune.recipes import load_recipe
from helpers.recipes import raw_recipe
from helpers.tiny_checkpoints import save, tree_digest

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
    magnitudes = tmp_path / "magnitudes"
    pruning.prune(planning.plan(source, raw_recipe(0.5)), magnitudes)
    with pytest.raises(CheckpointError, match="leave --scores out"):
        verify(magnitudes, source, scores=scores)


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


def problems_of(source, recipe):
    with pytest.raises(SelectionError) as error:
        planning.plan(source, recipe)
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
