"""--normalize: what it is by default, where it has no effect, and what was raw stays raw."""

import json

import pytest
import torch

from distprune.files.planning import plan
from distprune.files.recipe import FileRecipe
from helpers.tiny_checkpoints import save

RUN = ("distprune/run.json",)


@pytest.fixture
def source(tmp_path):
    """Matrices whose scales are thirds of each other."""
    torch.manual_seed(0)
    tensors = {f"layers.{i}.mlp.weight": torch.randn(16, 24) / 3**i for i in range(4)}
    return save(tmp_path / "source", tensors)


@pytest.fixture
def recipe_of(run, source):
    """The recipe that a command line makes."""
    return lambda *given: run("plan", source, *given, "--json").json["recipe"]


def write(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["-s", "0.5"], "rms"),
        (["-s", "0.5", "--normalize", "mean"], "mean"),
        (["-s", "0.5", "--normalize", "none"], None),
        (["-r", "magnitude_50"], "rms"),
        (["-r", "magnitude_50", "--normalize", "l2"], "l2"),
        (["-r", "layer_50"], None),
        (["-r", "layer_50", "--scope", "global"], "rms"),
        (["-r", "magnitude_50", "--scope", "layer"], None),
        (["-r", "random_50"], None),
        (["-r", "random_50", "--score", "magnitude"], "rms"),
        (["-r", "magnitude_50", "--score", "random"], None),
        (["-r", "semi_structured_2_4"], None),
        (["-r", "semi_structured_2_4", "-s", "0.5"], "rms"),
    ],
)
def test_the_default_is_rms_where_tensors_are_compared(recipe_of, given, expected):
    recipe = recipe_of(*given)
    assert recipe.get("normalize") == expected
    assert recipe["version"] == (1 if expected is None else 2)


def test_a_recipe_of_version_1_ranks_raw_magnitudes(run, recipe_of, source, tmp_path):
    raw = write(tmp_path / "raw.yaml", "version: 1\nsparsity: 0.5\n")
    said = write(tmp_path / "said.yaml", "version: 1\nsparsity: 0.5\nnormalize: mean\n")
    new = write(tmp_path / "new.yaml", "version: 2\nsparsity: 0.5\n")
    none = write(tmp_path / "none.yaml", "version: 2\nsparsity: 0.5\nnormalize: none\n")
    recipes = [recipe_of("-r", path) for path in (raw, said, new, none)]
    assert [each.get("normalize") for each in recipes] == [None, "mean", "rms", None]
    assert "normalize: none" in run("plan", source, "-r", raw).err
    assert "normalize" not in run("plan", source, "-r", new).err


def test_a_raw_result_is_that_of_versions_without_normalize(run, source, tmp_path):
    """So they verify each other's results, and go on with each other's unfinished ones."""
    out = tmp_path / "out"
    assert run("prune", source, out, "-s", "0.5", "--normalize", "none").code == 0
    assert "normalize" not in (out / "distprune" / "recipe.yaml").read_text()
    text = (out / "distprune" / "report.json").read_text()
    assert "normalize" not in text and "divisor" not in text
    report = json.loads(text)
    fields = [
        "sparsity", "scope", "pattern", "score", "seed", "include", "also", "exclude", "min_ndim",
        "input_dims", "nan", "masks", "min_sparsity", "max_sparsity", "groups", "card",
    ]  # fmt: skip
    assert list(report["recipe"]) == fields
    assert FileRecipe.load(out / "distprune" / "recipe.yaml") == FileRecipe(0.5)
    assert report["digest"] == plan(source, FileRecipe(0.5)).digest


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["-s", "0.5", "--scope", "layer"], "with scope 'layer', which compares weights of one"),
        (["-s", "0.5", "--scope", "row"], "with scope 'row', which compares weights of one"),
        (["--pattern", "2:4"], "beside a pattern, which compares weights of one tensor"),
        (["-s", "0.5", "--score", "random"], "with score 'random', which does not depend on"),
    ],
)
def test_where_it_has_no_effect_it_is_refused(run, source, given, why):
    done = run("plan", source, *given, "--normalize", "rms")
    assert done.code == 2 and f"normalize: has no effect {why}" in done.err
    assert run("plan", source, *given, "--normalize", "none").code == 0
    done = run("plan", source, *given, "--normalize", "max")
    assert done.code == 2 and "expected 'rms', 'l2', 'mean' or 'none'" in done.err


def test_groups_have_their_own(run, source, tmp_path):
    path = write(
        tmp_path / "groups.yaml",
        "version: 2\nsparsity: 0.5\nnormalize: l2\ngroups:\n"
        "  - select: {include: ['*.0.*', '*.1.*']}\n"
        "  - select: {include: ['*.2.*']}\n    scope: layer\n"
        "  - select: {include: ['*.3.*']}\n    normalize: mean\n",
    )
    found = run("plan", source, "-r", path, "--json").json["recipe"]["groups"]
    assert [group.get("normalize") for group in found] == ["l2", None, "mean"]
    done = run("plan", source, "-r", path)
    assert "magnitude / l2 norm of its tensor" in done.out
    assert "magnitude / mean magnitude of its tensor" in done.out
    done = run("plan", source, "-r", path, "--normalize", "rms")
    assert done.code == 2 and "expected no --normalize" in done.err
    path.write_text(
        "version: 2\nsparsity: 0.5\ngroups:\n"
        "  - select: {include: ['*.0.*']}\n    scope: layer\n    normalize: rms\n"
        "  - select: {include: ['*.1.*']}\n"
    )
    done = run("plan", source, "-r", path)
    assert done.code == 2 and "line 6, groups[0].normalize: has no effect with scope" in done.err
    path.write_text(
        "version: 2\nnormalize: rms\nsparsity: 0.5\nscope: row\ngroups:\n"
        "  - select: {include: ['*.0.*']}\n"
    )
    done = run("plan", source, "-r", path)
    assert done.code == 2 and "line 2, normalize: has no effect in any of the groups" in done.err


def test_what_is_said_of_it(run, source, tmp_path):
    out = tmp_path / "out"
    done = run("prune", source, out, "-s", "0.5", "-v")
    assert "ranked together by magnitude / rms of its tensor" in done.err
    assert " times the rms of its tensor; " in done.out
    values = json.loads((out / "distprune" / "report.json").read_text())
    for tensor in values["tensors"]:
        cut = values["threshold"] * tensor["divisor"]
        row = next(line for line in done.out.splitlines() if tensor["name"] in line).split()
        assert row[-2:] == [f"{tensor['divisor']:.4g}", f"{cut:.4g}"]
    card = (out / "README.md").read_text()
    assert "| ranked by | magnitude / rms of its tensor, all selected tensors together |" in card
    assert "| largest score that was pruned | " in card
    assert "Pruned by distprune, ranked together by magnitude / rms" in run("inspect", out).out
    assert run("inspect", out, "--json").json["recipe"]["normalize"] == "rms"
    assert "Pruned by" not in run("inspect", source).out
    assert run("inspect", source, "--json").json["recipe"] is None
