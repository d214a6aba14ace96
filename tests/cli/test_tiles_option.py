"""``--pattern 4x4`` beside a sparsity and a scope, on the command line and in recipes."""

import json

import pytest
import torch

from helpers.tiny_checkpoints import save, tree_digest

RUN = ("distprune/run.json",)


@pytest.fixture
def source(tmp_path):
    g = torch.Generator().manual_seed(0)
    tensors = {f"layers.{i}.mlp.up_proj.weight": torch.randn(16, 8, generator=g) for i in range(3)}
    return save(tmp_path / "source", tensors)


def test_plan_prune_and_verify(run, source, tmp_path):
    found = run("plan", source, "--pattern", "4x4", "-s", "0.3", "--scope", "layer", "--json").json
    assert found["num_to_prune"] == 3 * 2 * 16
    assert [tensor["num_to_prune"] for tensor in found["tensors"]] == [32] * 3
    done = run("plan", source, "--pattern", "4x4", "-s", "0.5")
    assert "whole tiles 4x4, ranked together by magnitude" in done.out
    assert "normalize" not in done.err
    target = tmp_path / "target"
    done = run("prune", source, target, "--pattern", "4x4", "-s", "0.5")
    assert done.code == 0, done.err
    assert "Largest pruned sum of a tile: " in done.out
    assert "1 of 1 tiles of this sum were pruned." in done.out
    assert run("verify", target, "--against", source).code == 0
    card = (target / "README.md").read_text()
    assert "whole tiles of 4 outputs and 4 inputs, those of all selected tensors together" in card
    assert "largest sum of a tile that was pruned" in card
    report = json.loads((target / "distprune" / "report.json").read_text())
    assert report["num_pruned"] == 3 * 4 * 16 and report["num_ties"] == 1
    # The stored recipe makes it again.
    stored = target / "distprune" / "recipe.yaml"
    again = tmp_path / "again"
    done = run("prune", source, again, "-r", stored)
    assert done.code == 0, done.err
    assert tree_digest(again, RUN) == tree_digest(target, RUN)


def test_options_override_the_recipe(run, source, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text('version: 2\npattern: "4x4"\nscope: layer\nsparsity: 0.5\n')

    def recipe(*options):
        done = run("plan", source, "-r", path, *options, "--json")
        assert done.code == 0, done.err
        recipe = done.json["recipe"]
        return recipe.get("pattern"), recipe.get("scope"), recipe.get("sparsity")

    assert recipe() == ("4x4", "layer", 0.5)
    assert recipe("--scope", "row") == ("4x4", "row", 0.5)
    assert recipe("-s", "0.25") == ("4x4", "layer", 0.25)
    assert recipe("--pattern", "2x8") == ("2x8", "layer", 0.5)
    assert recipe("--pattern", "2:4") == ("2:4", None, None)


def test_what_is_missing_or_does_not_fit_is_named(run, source):
    done = run("plan", source, "--pattern", "4x4")
    assert done.code == 2 and "the pattern 4x4 has no sparsity; expected --sparsity" in done.err
    done = run("plan", source, "--pattern", "4x3", "-s", "0.5")
    assert done.code == 2 and "4x3 does not fit" in done.err
    done = run("plan", source, "--pattern", "4x4", "-s", "0.5", "--normalize", "rms")
    assert done.code == 2 and "normalize: has no effect beside a pattern of tiles" in done.err
    done = run("plan", source, "--pattern", "4x4", "-s", "0.5", "--max-sparsity", "0.9")
    assert done.code == 2 and "limits: has no place beside a pattern of tiles" in done.err
    done = run("plan", source, "--pattern", "4x4", "-s", "0.5", "--nan", "keep")
    assert done.code == 2 and "a tile with a NaN has no sum" in done.err
