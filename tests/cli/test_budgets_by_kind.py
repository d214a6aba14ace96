"""Budgets by kind of layer: recipes with groups and limits, and what ``plan`` shows of them."""

import pytest
import torch

from distprune.files.recipe import FileRecipe
from helpers.tiny_checkpoints import load, save, tree_digest

RUN = ("distprune/run.json",)
SHAPES = {"self_attn.q_proj": (8, 8), "self_attn.o_proj": (8, 8), "mlp.up_proj": (25, 8)}


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(11, 8).bfloat16()}
    for layer in range(3):
        for name, shape in SHAPES.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape).bfloat16()
    tensors["lm_head.weight"] = torch.randn(11, 8).bfloat16()
    return save(tmp_path / "source", tensors)


def test_the_shipped_recipe_prunes_attention_and_mlp_by_their_own_shares(run, source, tmp_path):
    done = run("plan", source, "-r", "by_kind_of_layer")
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    assert ["0", "4", "256", "128", "50.00", "%"] in [line[:6] for line in lines]
    assert ["1", "2", "400", "280", "70.00", "%"] in [line[:6] for line in lines]
    assert "prune, group 1" in done.out and "keep: in no group" in done.out
    assert "each tensor within 0 to 95 %" in done.out
    assert "Prunes 408 of 656 elements (62.20 %) in 6 of 11 tensors, in 2 groups;" in done.out
    found = run("plan", source, "-r", "by_kind_of_layer", "--json").json
    assert [group["num_to_prune"] for group in found["groups"]] == [128, 280]
    by_name = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert by_name["model.layers.1.mlp.up_proj.weight"]["group"] == 1
    first = by_name["model.layers.0.mlp.up_proj.weight"]
    assert (first["group"], first["reason"]) == (None, "excluded")

    done = run("prune", source, tmp_path / "out", "-r", "by_kind_of_layer", "--json")
    assert done.code == 0, done.err
    zeros = {name: int((tensor == 0).sum()) for name, tensor in load(tmp_path / "out").items()}
    assert sum(count for name, count in zeros.items() if "attn" in name) == 128
    assert sum(count for name, count in zeros.items() if "mlp" in name) == 280
    assert not any(count for name, count in zeros.items() if ".layers.0." in name)
    groups = done.json["groups"]
    assert [(group["index"], group["num_pruned"]) for group in groups] == [(0, 128), (1, 280)]
    assert all(group["threshold_bits"].startswith("0x") for group in groups)
    assert run("verify", tmp_path / "out", "--against", source).code == 0

    # The stored recipe is one, with all its groups.
    stored = tmp_path / "out" / "distprune" / "recipe.yaml"
    assert run("prune", source, tmp_path / "again", "-r", stored).code == 0
    assert tree_digest(tmp_path / "again", RUN) == tree_digest(tmp_path / "out", RUN)


def test_options_that_each_group_has_itself_are_refused_by_name(run, source, tmp_path):
    given = ("-s", "0.5", "--exclude", "*.up_proj", "--max-sparsity", "0.9", "--nan", "keep")
    done = run("plan", source, "-r", "by_kind_of_layer", *given)
    assert done.code == 2
    assert "has 2 groups" in done.err
    assert "expected no --sparsity 0.5, --exclude *.up_proj, --max-sparsity 0.9." in done.err
    assert run("plan", source, "-r", "by_kind_of_layer", "--nan", "keep").code == 0


def test_limits_are_options_too(run, source, tmp_path):
    given = ("-s", "0.5", "--min-sparsity", "0.45", "--max-sparsity", "0.55")
    assert (
        "each tensor within 45 to 55 %"
        in run("plan", source, *given).err + run("plan", source, *given).out
    )
    done = run("prune", source, tmp_path / "out", *given, "--json")
    assert done.code == 0, done.err
    for tensor in done.json["tensors"]:
        low, high = tensor["limits"]
        assert 0.45 <= low / tensor["num_elements"] <= high / tensor["num_elements"] <= 0.55
        assert low <= tensor["num_pruned"] <= high
    assert FileRecipe.load(tmp_path / "out" / "distprune" / "recipe.yaml") == FileRecipe(
        0.5, min_sparsity=0.45, max_sparsity=0.55, normalize="rms"
    )
    done = run("plan", source, "-s", "0.5", "--max-sparsity", "0.4")
    assert done.code == 2 and "max_sparsity 0.4 of every tensor leaves" in done.err
    done = run("plan", source, "-s", "0.5", "--max-sparsity", "0.4", "--scope", "row")
    assert done.code == 2 and "no effect with scope 'row'" in done.err


def test_a_pattern_takes_the_place_of_limits(run, source, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("version: 1\nsparsity: 0.5\nlimits: {max_sparsity: 0.75}\n")
    assert run("plan", source, "-r", path, "--pattern", "2:4").code == 0
    assert run("plan", source, "-r", path, "--scope", "layer").code == 0


def test_group_mistakes_in_a_file_are_named(run, source, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "version: 1\ngroups:\n"
        "  - {select: {include: '*attn*'}, sparsity: 0.5, pattern: '2:4'}\n"
        "  - {select: {include: '*mlp*'}, sparsity: 0.5, scope: rows}\n"
    )
    done = run("plan", source, "-r", path)
    assert done.code == 2
    assert "groups[0].sparsity: has no place beside 'pattern'" in done.err
    assert "line 4, groups[1].scope: expected 'global', 'layer' or 'row'" in done.err
