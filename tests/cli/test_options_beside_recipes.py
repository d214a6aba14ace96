"""An option replaces what a recipe says; what has no place beside a recipe is refused by name."""

import pytest
import torch

from helpers.tiny_checkpoints import save


@pytest.fixture
def source(tmp_path):
    tensors = {f"layers.{n}.mlp.weight": torch.randn(8, 12) for n in range(2)}
    return save(tmp_path / "source", tensors)


def recipe_of(done):
    assert done.code == 0, done.err
    return {key: done.json["recipe"].get(key) for key in ("sparsity", "pattern", "scope", "limits")}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--sparsity", "0.5"], {"sparsity": 0.5, "scope": "global"}),
        (["--sparsity", "0.5", "--scope", "row"], {"sparsity": 0.5, "scope": "row"}),
        (["--pattern", "1:4"], {"pattern": "1:4"}),
        (
            ["--pattern", "4x4", "--sparsity", "0.5", "--scope", "row"],
            {"pattern": "4x4", "sparsity": 0.5, "scope": "row"},
        ),
    ],
)
def test_an_amount_replaces_the_pattern_of_a_recipe(run, source, options, expected):
    found = recipe_of(run("plan", source, "-r", "semi_structured_2_4", *options, "--json"))
    assert found == {"sparsity": None, "pattern": None, "scope": None, "limits": None} | expected


@pytest.mark.parametrize("scope", ["row", "layer", "global"])
@pytest.mark.parametrize("command", ["plan", "prune"])
def test_a_scope_beside_the_pattern_of_a_recipe_names_both(run, source, tmp_path, command, scope):
    places = [source, tmp_path / "out"]
    done = run(command, *places, "-r", "semi_structured_2_4", "--scope", scope)
    assert done.code == 2 and not (tmp_path / "out").exists()
    assert f"--scope {scope}" in done.err and "neither sparsity nor pattern" not in done.err
    assert "pattern 2:4 of the recipe semi_structured_2_4" in done.err


def test_a_scope_beside_a_pattern_on_the_command_line_names_both(run, source):
    done = run("plan", source, "--pattern", "2:4", "--scope", "global")
    assert done.code == 2 and "--scope global" in done.err and "--pattern 2:4" in done.err


@pytest.mark.parametrize(
    ("recipe", "options", "key"),
    [
        ("semi_structured_2_4", ["--max-sparsity", "0.9"], "limits: has no place beside 'pattern'"),
        ("semi_structured_2_4", ["--normalize", "l2"], "normalize: has no effect"),
        ("row_50", ["--min-sparsity", "0.1"], "limits: has no effect with scope 'row'"),
        ("layer_50", ["--seed", "3"], "seed: has no effect without score 'random'"),
    ],
)
def test_what_has_no_place_beside_a_recipe_names_both(run, source, recipe, options, key):
    done = run("plan", source, "-r", recipe, *options)
    assert done.code == 2 and key in done.err
    assert f"the recipe {recipe} with {' '.join(options)}" in done.err


def test_the_options_of_one_group_have_their_names_in_the_refusal(run, source):
    done = run("plan", source, "-r", "by_kind_of_layer", "--input-dim", "*=1", "--scope", "row")
    assert done.code == 2 and "expected no --scope row, --input-dim *=1." in done.err
