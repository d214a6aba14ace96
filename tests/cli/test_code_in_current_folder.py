"""Python files in the current folder, such as those of a downloaded checkpoint, are not run."""

import subprocess
import sys

import pytest
import torch
from commands import environment

from helpers.tiny_checkpoints import save

NAMES = ("torch", "numpy", "json", "typing", "typer", "rich", "yaml", "encodings", "signal")


@pytest.fixture
def trap(tmp_path):
    """A checkpoint with modules that leave a trace when they are imported."""
    folder = save(tmp_path / "trap", {"layers.0.weight": torch.randn(8, 8)})
    for name in NAMES:
        text = f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\nraise SystemExit(99)\n"
        (folder / f"{name}.py").write_text(text)
    return folder


def run(folder, *arguments, **more):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def trace(folder):
    path = folder.parent / "ran"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("command", [["--version"], ["plan", ".", "-s", "0.5"]])
def test_python_m_distprune_does_not_import_them(trap, command):
    if command == ["--version"]:
        run(trap, "-c", "import torch")
        assert trace(trap) == "torch "
        (trap.parent / "ran").unlink()
    code, _, err = run(trap, "-m", "distprune", *command)
    assert (code, trace(trap)) == (0, ""), err
