"""``distprune verify``: processes, progress, JSON, and folders that prune did not write."""

import pytest
import torch

from helpers.tiny_checkpoints import save


@pytest.fixture
def made(run, tmp_path):
    """(source, result)."""
    torch.manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(9, 16).bfloat16() for i in range(5)}
    source = save(tmp_path / "source", tensors)
    assert run("prune", source, tmp_path / "out", "-s", "0.5").code == 0
    return source, tmp_path / "out"


def damage(folder):
    """Two problems."""
    (folder / "config.json").unlink()
    with (folder / "tokenizer.json").open("a") as file:
        file.write("more")


def test_a_result_is_good_or_all_that_is_wrong_is_listed(run, made):
    source, out = made
    done = run("verify", out, "--against", source)
    assert done.code == 0 and done.err == ""
    assert "360 of 720 elements pruned (50.00 %)" in done.out
    damage(out)
    done = run("verify", out, "--against", source)
    assert done.code == 3 and len(done.out.splitlines()) == 2
    assert "tokenizer.json has " in done.out and "config.json" in done.out
    found = run("verify", out, "--against", source, "--json")
    assert found.code == 3 and found.json["problems"] == done.out.splitlines()
    assert found.json["is_good"] is False and found.json["num_pruned"] == 360


def test_what_prune_did_not_write(run, made, tmp_path):
    source, out = made
    assert run("apply", out, source, tmp_path / "told").code == 0
    assert run("prune", source, tmp_path / "bare", "-s", "0.5", "--no-masks").code == 0
    (tmp_path / "file").write_text("x")
    expected = {
        "told": "was made by `distprune apply`",
        "bare": "was pruned without masks",
        "source": "has no report",
        "file": "has no report",
        "nowhere": "has no report",
    }
    for name, text in expected.items():
        done = run("verify", tmp_path / name, "--against", source)
        assert done.code == 1 and text in done.err and done.out == "", name
        assert "Traceback" not in done.err
