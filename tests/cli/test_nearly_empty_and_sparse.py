"""Warnings after a run: a tensor that loses nearly all, and a source that is sparse already."""

import pytest
import torch

from distprune.files import planning, pruning
from distprune.files.reports import read_report
from helpers.recipes import raw_recipe
from helpers.tiny_checkpoints import save


@pytest.fixture
def tensors():
    """A pooler whose weights are a hundredth of the others', as in MiniLM."""
    torch.manual_seed(0)
    found = {f"layers.{i}.mlp.weight": torch.randn(40, 40) + 3 for i in range(3)}
    return found | {"pooler.weight": torch.randn(20, 40) / 100}


def test_a_tensor_that_loses_nearly_all_is_named_with_its_share(run, tensors, tmp_path):
    source = save(tmp_path / "source", tensors)
    raw = ("-s", "0.5", "--normalize", "none")
    assert "may empty some of them; normalize: rms" in run("plan", source, *raw).err
    done = run("prune", source, tmp_path / "out", *raw, "--json")
    assert done.code == 0
    (warning,) = done.json["warnings"]
    assert warning.startswith("pooler.weight (100.00 % of 800 elements) lost at least 99 %")
    assert "--max-sparsity" in warning and "layers" not in warning
    assert f"Warning: {warning}" in done.err
    assert read_report(tmp_path / "out").warnings == (warning,)
    # What it advises helps; and -q says nothing.
    for number, better in enumerate(([*raw, "--max-sparsity", "0.9"], ["-s", "0.5"])):
        done = run("prune", source, tmp_path / f"better{number}", *better)
        assert done.code == 0 and "Warning" not in done.err
    assert run("prune", source, tmp_path / "quiet", *raw, "-q").err == ""


@pytest.mark.parametrize(
    "recipe",
    [
        raw_recipe(0.995),
        raw_recipe(0.995, "layer"),
        raw_recipe(0.5, "layer"),
        raw_recipe(groups=(raw_recipe(1.0, include=("pooler*",)),)),
    ],
)
def test_nothing_is_said_where_so_much_was_asked_for(tensors, tmp_path, recipe):
    source = save(tmp_path / "source", tensors)
    assert pruning.prune(planning.plan(source, recipe), tmp_path / "out").warnings == ()


@pytest.mark.parametrize("way", [{"sparsity": 0.5}, {"pattern": "2:4"}])
def test_a_source_that_is_sparse_already(tmp_path, way):
    torch.manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(16, 40).bfloat16() for i in range(4)}
    tensors["layers.1.weight"].view(-1)[:100] = 0.0
    tensors["layers.2.weight"].view(-1)[:100] = -0.0
    plan = planning.plan(save(tmp_path / "source", tensors), raw_recipe(**way))
    report = pruning.prune(plan, tmp_path / "target")
    (warning,) = report.warnings
    assert "200 of the 2,560 selected elements (7.81 %) are zero in it" in warning
    zeros = {tensor.name: tensor.num_zero for tensor in report.tensors}
    assert zeros == {f"layers.{i}.weight": 100 * (i in (1, 2)) for i in range(4)}
