"""The options of a recipe: what they make, alone and beside a recipe, and what is refused."""

import json

import numpy as np
import pytest
import torch

from distprune.files.statistics_file import StoredStatistics, WeightLayout, write_statistics
from helpers.tiny_checkpoints import load, save

RUN = ("distprune/report.json",)
SHAPES = {"self_attn.q_proj": (8, 8), "self_attn.o_proj": (8, 8), "mlp.up_proj": (25, 8)}
NAMES = {f"model.layers.{n}.{name}.weight": SHAPES[name] for n in range(3) for name in SHAPES}
CARD = "---\nlicense: mit\n---\nThe card.\n"


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (11, 8), **NAMES, "lm_head.weight": (11, 8)}
    source = save(tmp_path / "source", {n: torch.randn(s).bfloat16() for n, s in shapes.items()})
    (source / "README.md").write_text(CARD)
    return source


@pytest.fixture
def statistics(tmp_path):
    draws = np.random.default_rng(0)
    parameters = {
        name: StoredStatistics(WeightLayout("linear", shape), 10, *draws.random((2, shape[1])))
        for name, shape in NAMES.items()
    }
    write_statistics(tmp_path / "stats.safetensors", "one_pass", parameters)
    return tmp_path / "stats.safetensors"


@pytest.fixture
def recipe_of(run, source):
    """The recipe that a command line makes."""
    return lambda *given: run("plan", source, *given, "--json").json["recipe"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("-s 0.5", {"normalize": "rms", "scope": "global"}),
        ("-s 0.5 --normalize mean", {"normalize": "mean"}),
        ("-s 0.5 --budget erk", {"budget": "erk", "normalize": None}),
        (
            "-s 0.5 --min-sparsity 0.45 --max-sparsity 0.55",
            {"min_sparsity": 0.45, "max_sparsity": 0.55},
        ),
        ("-s 0.5 --score random --seed 4", {"seed": 4, "normalize": None}),
        ("-r magnitude_50 -s 0 --exclude c --exclude d", {"sparsity": 0.0, "exclude": ["c", "d"]}),
        ("-r magnitude_50 --normalize l2", {"normalize": "l2"}),
        ("-r magnitude_50 --scope layer", {"normalize": None, "scope": "layer"}),
        ("-r layer_50 --scope global", {"normalize": "rms"}),
        ("-r semi_structured_2_4", {"normalize": None, "sparsity": None}),
        ("-r semi_structured_2_4 --pattern 1:4", {"pattern": "1:4", "sparsity": None}),
    ],
)
def test_an_option_replaces_what_a_recipe_says(recipe_of, given, expected):
    recipe = recipe_of(*given.split())
    assert {key: recipe.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("-r semi_structured_2_4 -s 0.5",
         ["semi_structured_2_4 with --sparsity", "found sparsity 0.5 and pattern '2:4'"]),
        ("-r row_50 --min-sparsity 0.1", ["min_sparsity 0.1 has no effect with scope 'row'"]),
        ("-s 0.5 --normalize max", ["'max' is not one of 'rms', 'l2', 'mean', 'none'"]),
        ("-s 0.5 --max-sparsity 0.4", ["max_sparsity allow for 0 to", "are to be"]),
    ],
)  # fmt: skip
def test_an_option_that_contradicts_the_recipe_is_refused_by_name(run, source, given, texts):
    done = run("plan", source, *given.split())
    assert done.code == 2 and all(text in done.err for text in texts), done.err


def test_groups_have_shares_of_their_own(run, source, tmp_path):
    done = run("plan", source, "-r", "by_kind_of_layer")
    assert done.code == 0, done.err
    assert "Group 0: prunes 128 of 256 elements (50.00 %), ranked" in done.out
    assert "Group 1: prunes 280 of 400 elements (70.00 %), ranked" in done.out
    assert "prune, group 1" in done.out and "keep: in no group" in done.out
    assert "Prunes 408 of 656 elements (62.20 %) in 6 of 11 tensors, in 2 groups;" in done.out
    done = run("prune", source, tmp_path / "out", "-r", "by_kind_of_layer", "--json")
    zeros = {name: int((tensor == 0).sum()) for name, tensor in load(tmp_path / "out").items()}
    assert sum(count for name, count in zeros.items() if "attn" in name) == 128
    assert sum(count for name, count in zeros.items() if "mlp" in name) == 280
    assert not any(count for name, count in zeros.items() if ".layers.0." in name)
    groups = done.json["groups"]
    assert [group["num_pruned"] for group in groups] == [128, 280]
    assert run("verify", tmp_path / "out", "--against", source).code == 0


def test_what_is_said_of_a_normalization(run, source, tmp_path):
    out = tmp_path / "out"
    done = run("prune", source, out, "-s", "0.5", "-v")
    assert "ranked together by magnitude / rms of its tensor" in done.err
    assert " times the rms of its tensor; " in done.out
    values = json.loads((out / "distprune" / "report.json").read_text())
    for tensor in values["tensors"]:
        assert tensor["divisor"] > 0 and tensor["name"] in done.out
    assert "Pruned by distprune, ranked together by magnitude / rms" in run("inspect", out).out
    assert run("inspect", out, "--json").json["recipe"]["normalize"] == "rms"
    assert run("inspect", source, "--json").json["recipe"] is None


def test_statistics_and_budgets_beside_a_recipe(run, recipe_of, source, statistics, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("score: wanda\nstatistics: stats.safetensors\nscope: layer\nsparsity: 0.5\n")
    assert recipe_of("-r", path)["score"] == "wanda"
    contradicted = run("plan", source, "-r", path, "--score", "magnitude")
    assert contradicted.code == 2 and "have no effect without score" in contradicted.err
    missing = run("plan", source, "-r", path, "--statistics", tmp_path / "absent")
    assert missing.code == 1 and "absent" in missing.err
    useless = run("plan", source, "-s", "0.5", "--statistics", statistics)
    assert useless.code == 2 and "no effect without score wanda" in useless.err
    owl = ["--scope", "global", "--statistics", statistics, "--budget", "owl"]
    made = recipe_of("-r", "wanda_row_50", *owl)
    assert (made["budget"], made["scope"], made["score"]) == ("owl", "global", "wanda")
    known = run("plan", source, "-s", "0.5", "--budget", "erk")
    assert "divided by budget erk, by magnitude" in known.out
