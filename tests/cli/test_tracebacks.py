"""No traceback where the machine, a file or the user is the cause; no code of others is run."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import environment

from distprune.files import planning
from helpers.sampling import every
from helpers.tiny_checkpoints import save


@pytest.fixture
def source(tmp_path):
    tensors = {f"layers.{i}.weight": torch.randn(8, 8) for i in range(40)}
    return save(tmp_path / "source", tensors)


def run_process(*arguments, shell=None, **keywords):
    """A command with its streams as given, or through a shell: "$@" is the command."""
    variables = environment(**keywords.pop("env", {}))
    command = [sys.executable, "-m", "distprune", *map(str, arguments)]
    if shell is not None:
        command = ["bash", "-c", f"set -o pipefail; {shell}", "bash", *command]
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=240, **keywords
    )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_stdout(source):
    for command in every(3, (["inspect", source, "--json"], ["recipe", "ls"], ["prune", "--help"])):
        code, _, err = run_process(*command, shell='"$@" > /dev/full')
        assert code == 1 and err == ("distprune: No space left on device.\n"), command


def test_a_reader_that_leaves(source, tmp_path):
    for command in every(2, (["inspect", source, "-v"], ["prune", "--help"], ["recipe", "schema"])):
        code, _, err = run_process(*command, shell='"$@" | true')
        assert (code, err) == (1, ""), command
    # The work does not depend on who reads the notes on stderr.
    command = ["prune", source, tmp_path / "out", "-s", "0.5"]
    code, out, _ = run_process(*command, shell='{ "$@" 2>&1 >&3 | true; } 3>&1')
    assert code == 0 and "Pruned 1,280" in out
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_terminals_that_lack_characters(tmp_path, encoding):
    source = save(tmp_path / "größe-模型", {"слой.weight": torch.randn(4, 4)})
    variables = {"PYTHONIOENCODING": encoding, "LC_ALL": "C", "PYTHONUTF8": "0"}
    code, out, err = run_process("inspect", source, env=variables, errors="replace")
    assert code == 0 and "\\u0441\\u043b" in out, err
    code, _, err = run_process("inspect", source / "ж", env=variables, errors="replace")
    assert code == 1 and "does not exist" in err


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (MemoryError("Unable to allocate 3 GiB"), "Unable to allocate 3 GiB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory"),
        (OSError(24, "Too many open files", "a.safetensors"), "a.safetensors: Too many open"),
        (OSError(5, "Input/output error", "b\x1b.bin"), r"b\x1b.bin: Input/output error"),
        (OSError(40, "Too many levels of symbolic links", "c"), "c: Too many levels"),
    ],
)
def test_errors_of_the_machine(run, source, raised, expected, monkeypatch):
    def fail(*_, **__):
        raise raised

    monkeypatch.setattr(planning, "plan", fail)
    done = run("plan", source, "-s", "0.5")
    assert done.code == 1 and expected in done.err, done.err
    assert done.err.count("\n") == 1 and "\x1b" not in done.err


NAMES = ("torch", "numpy", "json", "typing", "typer", "rich", "yaml", "encodings", "signal")


@pytest.fixture
def trap(tmp_path):
    """A checkpoint with modules that leave a trace when they are imported."""
    folder = save(tmp_path / "trap", {"layers.0.weight": torch.randn(8, 8)})
    for name in NAMES:
        text = f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\nraise SystemExit(99)\n"
        (folder / f"{name}.py").write_text(text)
    return folder


def run_in(folder, *arguments, **more):
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
        run_in(trap, "-c", "import torch")
        assert trace(trap) == "torch "
        (trap.parent / "ran").unlink()
    code, _, err = run_in(trap, "-m", "distprune", *command)
    assert (code, trace(trap)) == (0, ""), err
