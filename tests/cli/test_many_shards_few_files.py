"""Two hundred shards where a process may open sixty-four files: every command works."""

import subprocess
import sys

import pytest
import torch
from commands import environment

from helpers.tiny_checkpoints import save


@pytest.mark.slow
@pytest.mark.thorough
def test_two_hundred_shards_with_sixty_four_files(tmp_path):
    torch.manual_seed(0)
    shards = [{f"layers.{i}.weight": torch.randn(8, 8).bfloat16()} for i in range(200)]
    source = save(tmp_path / "source", *shards)
    target = tmp_path / "target"
    for command in (
        f"prune {source} {target} -s 0.5",
        f"verify {target} --against {source}",
        f"apply {target} {source} {target}-applied",
        f"diff {target} {target}-applied",
    ):
        line = f"ulimit -n 64; exec {sys.executable} -m distprune {command}"
        done = subprocess.run(
            ["bash", "-c", line], env=environment(), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, (command, done.stderr)
    assert "200 of 200 tensors are equal bit for bit." in done.stdout
