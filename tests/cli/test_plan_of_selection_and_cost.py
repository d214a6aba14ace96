"""``plan`` without a sparsity shows the selection; with one, the disk space that it takes."""

import os

import pytest
import torch

from distprune.cli import prune as plan_command
from distprune.files.planning import plan
from helpers.recipes import raw_recipe
from helpers.tiny_checkpoints import save, tree_digest


@pytest.fixture
def source(tmp_path):
    tensors = {f"layers.{i}.mlp.weight": torch.randn(8, 8) for i in range(4)}
    return save(tmp_path / "source", tensors | {"embed.weight": torch.randn(8, 8)})


def test_a_source_alone_shows_the_selection(run, source):
    done = run("plan", source)
    assert done.code == 0 and done.err == ""
    lines = {line.split()[0]: line for line in done.out.splitlines() if "F32" in line}
    assert lines["layers.*.mlp.weight"].endswith("  256  prune")
    assert lines["embed.weight"].endswith("keep: an embedding")
    assert "Selects 256 elements in 4 of 5 tensors. No sparsity is given" in done.out
    found = run("plan", source, "--json").json
    assert found["num_elements"] == 256 and found["num_to_prune"] == 0
    # Options of the selection act, and wrong ones are refused.
    assert "in 3 of 5 tensors" in run("plan", source, "--exclude", "layers.0.*").out
    assert run("plan", source, "--scope", "rows").code == 2
    assert run("plan", source, "-r", "nope").code == 2


def test_the_bytes_are_those_that_prune_needs(run, source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    before = tree_digest(tmp_path)
    found = run("plan", source, out, "-s", "0.5", "--json").json["cost"]
    assert found["free_bytes"] > found["missing_bytes"] == found["write_bytes"]
    assert tree_digest(tmp_path) == before
    total = sum(path.stat().st_size for path in source.iterdir())
    assert found["read_bytes"] == total + 3 * 4 * 256  # fp32 is measured and counted: three reads
    assert run("prune", source, out, "-s", "0.5").code == 0
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert abs(found["write_bytes"] - written) < 6000

    class Full:
        f_blocks, f_bfree, f_bavail, f_frsize = 2, 1, 1, 512

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    done = run("plan", source, tmp_path / "other", "-s", "0.5")
    assert done.code == 1 and "There is not enough space" in done.out
    done = run("plan", source, tmp_path / "other", "-s", "0.5", "--json")
    assert done.code == 1 and done.json["cost"]["free_bytes"] == 512
    assert run("plan", source, tmp_path / "no" / "where", "-s", "0.5").code == 1


def test_what_an_interrupted_run_left_is_not_needed_again(source, tmp_path):
    made = plan(source, raw_recipe(0.5))
    whole = plan_command.estimate(made, tmp_path / "out[1]")["missing_bytes"]
    part = tmp_path / "out[1].partial" / "distprune"
    part.mkdir(parents=True)
    (tmp_path / "out1.partial").write_bytes(bytes(4096))  # of another destination
    assert plan_command.estimate(made, tmp_path / "out[1]")["missing_bytes"] == whole > 0
    (part / "masks.safetensors").write_bytes(bytes(4096))
    assert plan_command.estimate(made, tmp_path / "out[1]")["missing_bytes"] == max(whole - 4096, 0)
