"""Odd names and places: one clear line and the right exit code, on a terminal of any encoding."""

import subprocess
import sys

import pytest
import torch
from commands import environment

from helpers.tiny_checkpoints import save


@pytest.fixture
def source(tmp_path):
    return save(tmp_path / "source", {"layers.0.weight": torch.randn(8, 8).bfloat16()})


def run_bytes(*arguments, **keywords):
    """In a process of its own, whose output is strict: as it is on a terminal."""
    command = [sys.executable, "-m", "distprune", *arguments]
    return subprocess.run(command, capture_output=True, env=environment(**keywords), timeout=300)


def test_one_line_and_the_right_code(run, source, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for code, arguments in [
        (1, ("prune", source, "/", "-s", "0.5")),
        (1, ("prune", source, tmp_path / ("x" * 240), "-s", "0.5")),
        (1, ("prune", source, tmp_path / "loop", "-s", "0.5")),
        (1, ("plan", tmp_path / "loop", "-s", "0.5")),
        (1, ("inspect", tmp_path / "loop")),
        (1, ("diff", source, tmp_path / "none")),
        (1, ("plan", "x" * 300, "-s", "0.5")),
        (1, ("plan", "x/" * 3000, "-s", "0.5")),
    ]:
        done = run(*arguments)
        assert done.code == code, (arguments, done.err)
        lines = [line for line in done.err.splitlines() if "Prunes" not in line]
        assert len(lines) == 1 and lines[0].startswith("distprune: "), done.err
