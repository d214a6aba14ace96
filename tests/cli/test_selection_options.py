"""``--also`` adds to the default, ``--input-dim`` names a dimension; warnings go to stderr."""

import pytest
import torch
import yaml

from helpers.tiny_checkpoints import save

NAMES = {
    "model.embed_tokens.weight": (8, 4),
    "model.layers.0.mlp.up_proj.weight": (8, 4),
    "model.layers.0.mlp.experts.w1": (2, 4, 8),
    "lm_head.weight": (8, 4),
}


@pytest.fixture
def source(tmp_path):
    g = torch.Generator().manual_seed(0)
    return save(tmp_path / "source", {n: torch.randn(s, generator=g) for n, s in NAMES.items()})


def pruned(done):
    return {t["name"] for t in done.json["tensors"] if t["is_pruned"]}


def test_also_adds_to_the_default(run, source, tmp_path):
    default = pruned(run("plan", source, "-s", "0.5", "--json"))
    assert default == {"model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.experts.w1"}
    more = run("plan", source, "-s", "0.5", "--also", "lm_head", "--json")
    assert pruned(more) == default | {"lm_head.weight"} and more.err == ""
    assert more.json["recipe"]["also"] == ["lm_head"]
    path = tmp_path / "mine.yaml"
    path.write_text("sparsity: 0.5\nalso: lm_head\n")
    assert pruned(run("plan", source, "-r", path, "--json")) == pruned(more)
    refused = run("plan", source, "-r", path, "--include", "lm_head")
    assert refused.code == 2 and "also adds to the default" in refused.err
    refused = run("plan", source, "-s", "0.5", "--also", "lm_haed")
    assert refused.code == 2 and "also: 'lm_haed' matches none" in refused.err


def test_input_dim_is_in_recipe_report_and_inspect(run, source, tmp_path):
    refused = run("prune", source, tmp_path / "a", "--pattern", "2:4")
    assert refused.code == 2
    assert "--input-dim 'model.layers.*.mlp.experts.w1=DIM'" in refused.err
    found = run("inspect", source, "--json").json["tensors"]
    assert found[2]["name"] == "model.layers.0.mlp.experts.w1" and found[2]["patterns"] == {}
    pattern = "model.layers.*.mlp.experts.w1"
    done = run("prune", source, tmp_path / "a", "--pattern", "2:4", "--input-dim", f"{pattern}=1")
    assert done.code == 0
    recipe = yaml.safe_load((tmp_path / "a" / "distprune" / "recipe.yaml").read_text())
    assert recipe["input_dims"] == {pattern: [1]}
    assert run("verify", tmp_path / "a", "--against", source).code == 0
    again = run("prune", source, tmp_path / "b", "-r", tmp_path / "a" / "distprune/recipe.yaml")
    assert again.code == 0
    one, two = [(tmp_path / each / "model.safetensors").read_bytes() for each in "ab"]
    assert one == two
    counts = run("inspect", tmp_path / "a", "--json").json["tensors"][2]["patterns"]["2:4"]
    assert counts == {"num_groups": 16, "num_kept": 16}


@pytest.mark.parametrize("option", ["a", "=1", "a=", "a=x", "a=1,", "*.w1=5", "no=1"])
def test_input_dims_that_are_wrong(run, source, option):
    for command in (("plan", source, "--pattern", "2:4"), ("inspect", source)):
        done = run(*command, "--input-dim", option, "--json")
        assert done.code == 2 and "input" in done.err and "Traceback" not in done.err


def test_also_that_adds_nothing_is_a_warning(run, tmp_path):
    tensors = {"a.weight": torch.ones(4, 4), "a.bias": torch.ones(4), "b.bias": torch.ones(1, 4)}
    source = save(tmp_path / "source", tensors)
    found = run("plan", source, "-s", "0.5", "--also", "*.bias", "--json")
    assert found.json["warnings"] == [
        "also: a.bias is left alone all the same: fewer than 2 dimensions.",
        "also: b.bias is left alone all the same: fewer than 2 dimensions that are larger than 1.",
    ]
    assert pruned(found) == {"a.weight"}
    found = run("plan", source, "-s", "0.5", "--also", "*.bias", "--min-ndim", "1", "--json")
    assert found.json["warnings"] == [] and pruned(found) == set(tensors)
