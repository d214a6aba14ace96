"""Python files in the current folder, such as those of a downloaded checkpoint, are not run."""

import os
import subprocess
import sys

import pytest
import torch
from commands import ROOT, environment

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


def test_the_traps_work(trap):
    run(trap, "-c", "import torch")
    assert trace(trap) == "torch "


@pytest.mark.parametrize("command", [["--version"], ["plan", ".", "-s", "0.5"]])
def test_python_m_distprune_does_not_import_them(trap, command):
    code, _, err = run(trap, "-m", "distprune", *command)
    assert (code, trace(trap)) == (0, ""), err


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [["-m", "distprune"], pytest.param(["SCRIPT"], marks=pytest.mark.thorough)]
)
def test_the_processes_of_nproc_do_not_import_them(trap, tmp_path, program):
    if program == ["SCRIPT"]:  # what an installation makes of [project.scripts]
        script = tmp_path / "bin" / "distprune"
        script.parent.mkdir()
        script.write_text("from distprune.cli.main import main\nmain()\n")
        program = [script]
    code, _, err = run(trap, *program, "prune", ".", tmp_path / "out", "-s", "0.5", "--nproc", "2")
    assert (code, trace(trap)) == (0, ""), err
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.thorough
def test_the_processes_of_nproc_run_the_package_that_started_them(trap, tmp_path):
    """It may have been found in the current folder, which is not on their path."""
    environment_without = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "distprune", "prune", trap, out, "-s", "0.5", "--nproc", "2"],
        cwd=ROOT, env=environment_without, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0 and out.exists(), done.stderr
