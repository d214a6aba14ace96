"""--score, --statistics and --scores: the command line."""

import json

import numpy as np
import pytest
import torch

from distprune.files.checkpoints.statistics_file import (
    StoredStatistics,
    WeightLayout,
    write_statistics,
)
from helpers.tiny_checkpoints import save

NAMES = [f"layers.{n}.mlp.weight" for n in range(3)]


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    return save(tmp_path / "source", {name: torch.randn(8, 12).bfloat16() for name in NAMES})


@pytest.fixture
def statistics(tmp_path):
    draws = np.random.default_rng(0)
    parameters = {
        name: StoredStatistics(WeightLayout("linear", (8, 12)), 10, *draws.random((2, 12)))
        for name in NAMES
    }
    write_statistics(tmp_path / "stats.safetensors", "one_pass", parameters)
    return tmp_path / "stats.safetensors"


def test_plan_prune_and_verify_by_wanda(run, source, statistics, tmp_path):
    given = ["--score", "wanda", "--statistics", statistics, "-s", "0.5"]
    found = run("plan", source, *given, "--json").json
    assert found["recipe"]["normalize"] == "rms" and found["recipe"]["score"] == "wanda"
    assert "by wanda / rms of its tensor" in run("plan", source, *given).out
    done = run("prune", source, tmp_path / "out", *given)
    assert "Largest pruned score" in done.out and "times the rms of its tensor" in done.out
    assert run("verify", tmp_path / "out", "--against", source).code == 0
    raw = run("prune", source, tmp_path / "raw", *given, "--normalize", "none")
    assert "Raw scores of several tensors" in raw.err and "Largest pruned score" in raw.out


def test_the_shipped_recipe_needs_statistics(run, source, statistics, tmp_path):
    refused = run("plan", source, "-r", "wanda_row_50")
    assert refused.code == 2 and "--statistics FILE" in refused.err
    fits = run("plan", source, "-r", "wanda_row_50", "--statistics", statistics, "--json").json
    assert fits["num_to_prune"] == fits["num_elements"] / 2


def test_scores_from_elsewhere(run, source, tmp_path):
    torch.manual_seed(1)
    scores = save(tmp_path / "scores", {name: torch.randn(8, 12) for name in NAMES})
    done = run("prune", source, tmp_path / "out", "-s", "0.5", "--scores", scores)
    assert done.code == 0 and "by given scores / rms of its tensor" in done.err
    refused = run("verify", tmp_path / "out", "--against", source)
    assert refused.code == 3 and "--scores FOLDER" in refused.err
    checked = run("verify", tmp_path / "out", "--against", source, "--scores", scores)
    assert checked.code == 0, checked.out


def test_options_replace_what_a_recipe_says(run, source, statistics, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "version: 2\nscore: wanda\nstatistics: stats.safetensors\nscope: layer\nsparsity: 0.5\n"
    )
    assert run("plan", source, "-r", recipe, "--json").json["recipe"]["score"] == "wanda"
    magnitude = run("plan", source, "-r", recipe, "--score", "magnitude", "--json").json["recipe"]
    assert magnitude["score"] == "magnitude" and "statistics" not in magnitude
    missing = run("plan", source, "-r", recipe, "--statistics", tmp_path / "absent")
    assert missing.code == 3 and "absent cannot be read" in missing.err
    useless = run("plan", source, "-s", "0.5", "--statistics", statistics)
    assert useless.code == 2 and "no effect without score 'wanda'" in useless.err


def test_a_budget_replaces_what_excludes_it(run, source, statistics, tmp_path):
    def recipe_of(*given):
        return run("plan", source, *given, "--json").json["recipe"]

    assert recipe_of("-s", "0.5", "--budget", "erk")["budget"] == "erk"
    made = recipe_of("-r", "wanda_row_50", "--statistics", statistics, "--budget", "owl")
    assert (made["budget"], made["scope"], made["score"]) == ("owl", "global", "wanda")
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(made))
    assert recipe_of("-r", file, "--score", "magnitude")["statistics"] == str(statistics)
    assert "budget" not in recipe_of("-r", file, "--scope", "row")
    assert "budget" not in recipe_of("-r", file, "--score", "magnitude", "--pattern", "1:2")
    known = run("plan", source, "-s", "0.5", "--budget", "erk")
    assert "divided by budget erk, by magnitude" in known.out
    error = run("plan", source, "-s", "0.5", "--budget", "erk", "--normalize", "rms").err
    assert "has no effect beside a budget" in error
