"""-v lists every tensor, in each command that has it."""

import pytest
import torch

from helpers.tiny_checkpoints import save


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    return save(tmp_path / "source", {f"layers.{i}.weight": torch.randn(8, 8) for i in range(3)})


def rows(text):
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if "layers." in line}


def test_verify_and_apply_list_the_masks(run, source, tmp_path):
    out, other, how = tmp_path / "out", tmp_path / "other", ("-s", "0.3", "-v")
    pruned = {name: row[:4] for name, row in rows(run("prune", source, out, *how).out).items()}
    assert set(pruned) == {f"layers.{i}.weight" for i in range(3)}
    assert sum(int(row[1]) for row in pruned.values()) == round(0.3 * 192)
    verify, apply = ["verify", out, "--against", source], ["apply", out, source, other]
    assert rows(run(*verify, "-v").out) == pruned
    assert rows(run(*apply, "-v").out) == pruned
    assert rows(run(*verify).out) == {}
    assert run(*verify, "-v", "--json").json["is_good"] is True


def test_every_command_that_has_it(run, source, tmp_path):
    assert run("prune", source, tmp_path / "out", "-s", "0.5", "--scope", "layer").code == 0
    for command in (
        ["plan", source, "-s", "0.5"],
        ["inspect", source],
        ["diff", source, source],
        ["verify", tmp_path / "out", "--against", source],
    ):
        short, long = run(*command).out, run(*command, "-v").out
        assert "layers.2.weight" in long and "layers.2.weight" not in short, command
