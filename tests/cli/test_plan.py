"""``distprune plan``: the selection, flags and recipes, its output, the disk space, refusals."""

import json
import os

import pytest
import torch
import yaml

from distprune.cli import prune as plan_command
from distprune.files.planning import plan
from distprune.recipes import shipped_recipes
from helpers.recipes import raw_recipe
from helpers.tiny_checkpoints import save, save_in_files, tree_digest

NAMES = {
    "model.embed_tokens.weight": (8, 4),
    **{f"model.layers.{i}.mlp.up_proj.weight": (8, 4) for i in range(3)},
    "model.layers.0.mlp.down_proj.weight": (4, 8),
    "model.norm.weight": (4,),
}


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in NAMES.items()}
    return save_in_files(tmp_path / "source", tensors, 3)


def test_a_table_says_what_is_pruned_and_why_not(run, source):
    before = tree_digest(source)
    done = run("plan", source, "--sparsity", "0.25")
    assert done.code == 0 and done.err == ""
    table = {line.split()[0]: line for line in done.out.splitlines() if "BF16" in line}
    assert table["model.embed_tokens.weight"].endswith("keep: an embedding")
    assert table["model.norm.weight"].endswith("keep: fewer than 2 dimensions")
    row = "model.layers.*.mlp.up_proj.weight 3 BF16 8 x 4 96 prune"
    assert table["model.layers.*.mlp.up_proj.weight"].split() == row.split()
    assert "Prunes 32 of 128 elements (25.00 %) in 4 of 6 tensors, ranked together" in done.out

    done = run("plan", source, "--sparsity", "0.25", "--scope", "layer", "-v")
    assert "model.layers.2.mlp.up_proj.weight" in done.out
    assert "prune 8" in done.out
    assert tree_digest(source) == before


def test_json_has_every_tensor(run, source):
    done = run("plan", source, "--pattern", "1:4", "--exclude", "*.down_proj.*", "--json")
    assert done.json["num_to_prune"] == 72 and done.json["num_elements"] == 96
    tensors = {each["name"]: each for each in done.json["tensors"]}
    assert set(tensors) == set(NAMES)
    assert tensors["model.layers.1.mlp.up_proj.weight"]["num_to_prune"] == 24
    assert tensors["model.layers.0.mlp.down_proj.weight"]["reason"] == "excluded"
    assert done.json["copied"] == [
        "config.json", "model.safetensors.index.json", "tokenizer.json"
    ]  # fmt: skip


def test_what_does_not_fit_is_refused(run, source, tmp_path):
    done = run("prune", source, tmp_path / "out")
    assert done.code == 2 and "expected one of sparsity, pattern and schedule" in done.err
    done = run("plan", source, "-s", "1.5", "--include", "re:(")
    assert done.code == 2 and "sparsity: Input" in done.err and "include.0: missing" in done.err
    done = run(
        "plan", source, "--pattern", "5:16", "--include", "model.layers.*", "--exclude", "no"
    )
    assert done.code == 2 and done.out == ""
    assert "16 does not divide" in done.err

    next(source.glob("*-00002-*")).unlink()
    (source / "model-00001-of-00002.safetensors").write_bytes(b"version https://git-lfs.git")
    done = run("plan", source, "-s", "0.5", "--json")
    assert (done.code, done.out) == (1, "")
    assert "not a safetensors file" in done.err and "00002" in done.err


@pytest.mark.parametrize(
    ("architecture", "flags", "is_warned"),
    [
        ("LlamaForCausalLM", ["--sparsity", "0.5"], True),
        ("LlamaForCausalLM", ["--pattern", "2:4"], True),
        ("LlamaForCausalLM", ["--sparsity", "0.25"], False),
        ("LlamaForCausalLM", ["--sparsity", "0.5", "--score", "random"], False),
        ("BertModel", ["--sparsity", "0.5"], False),
    ],
)
def test_pruning_much_of_a_language_model_by_magnitude_is_advised_against(
    run, source, architecture, flags, is_warned
):
    (source / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    done = run("plan", source, *flags)
    assert done.code == 0
    assert ("Without --score" in done.err) == is_warned


FOR_TRAINING = {"cubic_80"}


@pytest.mark.parametrize(
    "name", sorted(shipped_recipes().keys() - {"by_kind_of_layer", "wanda_row_50"} - FOR_TRAINING)
)
def test_shipped_recipes_fit(run, source, name):
    if name.startswith("language_model"):
        done = run("plan", source, "-r", name)
        assert done.code == 2 and "--text FILE makes them" in done.err
        return
    found = run("plan", source, "-r", name, "--json").json
    assert found["num_to_prune"] == 64 and found["num_elements"] == 128


@pytest.fixture
def plain_source(tmp_path):
    tensors = {f"layers.{i}.mlp.weight": torch.randn(8, 8) for i in range(4)}
    return save(tmp_path / "plain_source", tensors | {"embed.weight": torch.randn(8, 8)})


def test_a_source_alone_shows_the_selection(run, plain_source):
    done = run("plan", plain_source)
    assert done.code == 0 and done.err == ""
    lines = {line.split()[0]: line for line in done.out.splitlines() if "F32" in line}
    assert lines["layers.*.mlp.weight"].endswith("  256  prune")
    assert lines["embed.weight"].endswith("keep: an embedding")
    assert "Selects 256 elements in 4 of 5 tensors. No sparsity is given" in done.out
    found = run("plan", plain_source, "--json").json
    assert found["num_elements"] == 256 and found["num_to_prune"] == 0
    # Options of the selection act, and wrong ones are refused.
    assert "in 3 of 5 tensors" in run("plan", plain_source, "--exclude", "layers.0.*").out
    assert run("plan", plain_source, "--scope", "rows").code == 2
    assert run("plan", plain_source, "-r", "nope").code == 2


def test_the_bytes_are_those_that_prune_needs(run, plain_source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    before = tree_digest(tmp_path)
    found = run("plan", plain_source, out, "-s", "0.5", "--json").json["cost"]
    assert found["free_bytes"] > found["missing_bytes"] == found["write_bytes"]
    assert tree_digest(tmp_path) == before
    total = sum(path.stat().st_size for path in plain_source.iterdir())
    assert found["read_bytes"] == total + 3 * 4 * 256  # fp32 is measured and counted: three reads
    assert run("prune", plain_source, out, "-s", "0.5").code == 0
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert abs(found["write_bytes"] - written) < 6000

    class Full:
        f_blocks, f_bfree, f_bavail, f_frsize = 2, 1, 1, 512

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    done = run("plan", plain_source, tmp_path / "other", "-s", "0.5")
    assert done.code == 1 and "There is not enough space" in done.out
    done = run("plan", plain_source, tmp_path / "other", "-s", "0.5", "--json")
    assert done.code == 1 and done.json["cost"]["free_bytes"] == 512
    assert run("plan", plain_source, tmp_path / "no" / "where", "-s", "0.5").code == 1


def test_what_an_interrupted_run_left_is_not_needed_again(plain_source, tmp_path):
    made = plan(plain_source, raw_recipe(0.5))
    whole = plan_command.estimate(made, tmp_path / "out[1]")["missing_bytes"]
    part = tmp_path / "out[1].partial" / "distprune"
    part.mkdir(parents=True)
    (tmp_path / "out1.partial").write_bytes(bytes(4096))  # of another destination
    assert plan_command.estimate(made, tmp_path / "out[1]")["missing_bytes"] == whole > 0
    (part / "masks.safetensors").write_bytes(bytes(4096))
    assert plan_command.estimate(made, tmp_path / "out[1]")["missing_bytes"] == max(whole - 4096, 0)


# ``--also`` adds to the default, ``--input-dim`` names a dimension; warnings go to stderr.


NAMES_OF_SELECTION = {
    "model.embed_tokens.weight": (8, 4),
    "model.layers.0.mlp.up_proj.weight": (8, 4),
    "model.layers.0.mlp.experts.w1": (2, 4, 8),
    "lm_head.weight": (8, 4),
}


@pytest.fixture
def source_of_selection(tmp_path):
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in NAMES_OF_SELECTION.items()}
    return save(tmp_path / "source", tensors)


def pruned(done):
    return {t["name"] for t in done.json["tensors"] if t["is_pruned"]}


def test_also_adds_to_the_default(run, source_of_selection, tmp_path):
    default = pruned(run("plan", source_of_selection, "-s", "0.5", "--json"))
    assert default == {"model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.experts.w1"}
    more = run("plan", source_of_selection, "-s", "0.5", "--also", "lm_head", "--json")
    assert pruned(more) == default | {"lm_head.weight"} and more.err == ""
    assert more.json["recipe"]["also"] == ["lm_head"]
    path = tmp_path / "mine.yaml"
    path.write_text("sparsity: 0.5\nalso: lm_head\n")
    assert pruned(run("plan", source_of_selection, "-r", path, "--json")) == pruned(more)
    refused = run("plan", source_of_selection, "-r", path, "--include", "lm_head")
    assert refused.code == 2 and "also adds to the default" in refused.err
    refused = run("plan", source_of_selection, "-s", "0.5", "--also", "lm_haed")
    assert refused.code == 2 and "also: 'lm_haed' matches none" in refused.err


def test_input_dim_is_in_recipe_report_and_inspect(run, source_of_selection, tmp_path):
    command = ["prune", source_of_selection, tmp_path / "a", "--pattern", "2:4"]
    refused = run(*command)
    assert refused.code == 2
    assert "--input-dim 'model.layers.*.mlp.experts.w1=DIM'" in refused.err
    found = run("inspect", source_of_selection, "--json").json["tensors"]
    assert found[2]["name"] == "model.layers.0.mlp.experts.w1" and found[2]["patterns"] == {}
    pattern = "model.layers.*.mlp.experts.w1"
    assert run(*command, "--input-dim", f"{pattern}=1").code == 0
    recipe = tmp_path / "a" / "distprune" / "recipe.yaml"
    assert yaml.safe_load(recipe.read_text())["input_dims"] == {pattern: [1]}
    assert run("verify", tmp_path / "a", "--against", source_of_selection).code == 0
    assert run("prune", source_of_selection, tmp_path / "b", "-r", recipe).code == 0
    one, two = [(tmp_path / each / "model.safetensors").read_bytes() for each in "ab"]
    assert one == two
    counts = run("inspect", tmp_path / "a", "--json").json["tensors"][2]["patterns"]["2:4"]
    assert counts == {"num_groups": 16, "num_kept": 16}


@pytest.mark.parametrize("option", ["a", "=1", "a=", "a=x", "a=1,", "*.w1=5", "no=1"])
def test_input_dims_that_are_wrong(run, source_of_selection, option):
    for command in (["plan", "--pattern", "2:4"], ["inspect"]):
        done = run(*command, source_of_selection, "--input-dim", option, "--json")
        assert done.code == 2 and "input" in done.err and "Traceback" not in done.err


def test_also_that_adds_nothing_is_a_warning(run, tmp_path):
    tensors = {"a.weight": torch.ones(4, 4), "a.bias": torch.ones(4), "b.bias": torch.ones(1, 4)}
    source_of_selection = save(tmp_path / "source", tensors)
    command = ["plan", source_of_selection, "-s", "0.5", "--also", "*.bias", "--json"]
    found = run(*command)
    assert found.json["warnings"] == [
        "also: a.bias is left alone all the same: fewer than 2 dimensions.",
        "also: b.bias is left alone all the same: fewer than 2 dimensions that are larger than 1.",
    ]
    assert pruned(found) == {"a.weight"}
    found = run(*command, "--min-ndim", "1")
    assert found.json["warnings"] == [] and pruned(found) == set(tensors)
