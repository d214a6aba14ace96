"""No traceback where the machine, a file or the user is the cause: one line and an exit code."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import environment

from distprune.files import planning
from helpers.sampling import every
from helpers.tiny_checkpoints import save

MEGABYTE = 1 << 20


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
        assert code == 4 and err == (
            "distprune: stdout cannot be written: No space left on device.\n"
        ), command


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_stderr_does_not_stop_the_work(source, tmp_path):
    command = ["prune", source, tmp_path / "out", "-s", "0.5"]
    code, out, _ = run_process(*command, shell='"$@" 2> /dev/full')
    assert code == 0 and "Pruned 1,280" in out


def test_a_reader_that_leaves(source, tmp_path):
    for command in every(2, (["inspect", source, "-v"], ["prune", "--help"], ["recipe", "schema"])):
        code, _, err = run_process(*command, shell='"$@" | true')
        assert (code, err) == (141, ""), command
    # The work does not depend on who reads the notes on stderr.
    command = ["prune", source, tmp_path / "out", "-s", "0.5"]
    code, out, _ = run_process(*command, shell='{ "$@" 2>&1 >&3 | true; } 3>&1')
    assert code == 0 and "Pruned 1,280" in out
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_closed_streams(source, tmp_path):
    for number, shell in enumerate(('"$@" >&-', '"$@" <&- >&- 2>&-')):
        out = tmp_path / f"out-{number}"
        assert run_process("prune", source, out, "-s", "0.5", shell=shell)[0] == 0
        # No file got the number of a stream, and what was meant for it.
        expected = (tmp_path / "out-0" / "model.safetensors").read_bytes()
        assert (out / "model.safetensors").read_bytes() == expected
    assert run_process("inspect", source / "no", shell='"$@" 2>&-')[0] == 3


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.thorough)])
def test_terminals_that_lack_characters(tmp_path, encoding):
    source = save(tmp_path / "größe-模型", {"слой.weight": torch.randn(4, 4)})
    variables = {"PYTHONIOENCODING": encoding, "LC_ALL": "C", "PYTHONUTF8": "0"}
    code, out, err = run_process("inspect", source, env=variables, errors="replace")
    assert code == 0 and "\\u0441\\u043b" in out, err
    code, _, err = run_process("inspect", source / "ж", env=variables, errors="replace")
    assert code == 3 and "does not exist" in err


def limit(megabytes):
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (megabytes * MEGABYTE,) * 2)


@pytest.mark.parametrize(
    "megabytes", [100, *(pytest.param(n, marks=pytest.mark.thorough) for n in (300, 500)), 600]
)
def test_too_little_memory_for_torch(source, tmp_path, megabytes):
    command = ["prune", source, tmp_path / "out", "-s", "0.5", "--json"]
    code, out, err = run_process(*command, preexec_fn=limit(megabytes))
    last = err.splitlines()[-1]
    assert code == 7 and "memory" in last and "ulimit -v" in last, err
    assert out.count("exit_code") == 1 and not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("raised", "code", "expected"),
    [
        (MemoryError("Unable to allocate 3 GiB"), 7, "Unable to allocate 3 GiB"),
        (ImportError("x.so: failed to map segment from shared object"), 7, "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 7, "memory"),
        (RuntimeError("can't start new thread"), 7, "memory"),
        (OSError(24, "Too many open files", "a.safetensors"), 7, "ulimit -n"),
        (OSError(5, "Input/output error", "b\x1b.bin"), 4, r"b\x1b.bin: Input/output error"),
        (OSError(40, "Too many levels of symbolic links", "c"), 4, "c: Too many levels"),
        (RecursionError("maximum recursion depth"), 3, "nested too deeply"),
    ],
)
def test_errors_of_the_machine(run, source, raised, code, expected, monkeypatch):
    def fail(*_, **__):
        raise raised

    monkeypatch.setattr(planning, "plan", fail)
    done = run("plan", source, "-s", "0.5")
    assert done.code == code and expected in done.err, done.err
    assert done.err.count("\n") == 1 and "\x1b" not in done.err


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, "distprune: interrupted.\n"),
        (signal.SIGTERM, 143, "distprune: terminated.\n"),
    ],
)
@pytest.mark.parametrize("module", ["typer", "yaml", "numpy"])
def test_a_signal_in_the_middle_of_an_import(source, tmp_path, number, code, line, module):
    """Libraries make an ImportError of whatever is raised there, or nothing at all."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / f"{module}.py").write_text(
        "import os, time\ntry:\n"
        f"    os.kill(os.getpid(), {int(number)})\n    time.sleep(20)\n"
        "except BaseException:\n    raise ImportError('lost') from None\n"
    )
    variables = {"PYTHONPATH": f"{folder}:{environment()['PYTHONPATH']}"}
    command = ["inspect", source] if module != "yaml" else ["recipe", "show", "layer_50"]
    found, out, err = run_process(*command, "--json", env=variables)
    assert (found, err) == (code, line)
    assert json.loads(out) == {"exit_code": code, "error": line[11:-1]}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_that_may_not_be_read(source):
    (source / "config.json").chmod(0)
    code, _, err = run_process("plan", source, "-s", "0.5")
    assert code == 3 and "config.json" in err
