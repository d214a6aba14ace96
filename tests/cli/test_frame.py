"""What all commands share: help, exit codes, stdout and stderr; recipes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner

from distprune.cli.app import app
from distprune.cli.options import option_name
from distprune.cli.prune import prune
from distprune.files import planning
from distprune.files.errors import format_percent, format_size
from distprune.recipes import Recipe, load_recipe, shipped_recipes
from helpers.forked_scripts import end_of, environment, start
from helpers.sampling import every
from helpers.tiny_checkpoints import save

HELPS = """
import sys
from distprune.cli import main

def helps(*command):
    sys.stdout.flush()
    try:
        main([*command, "--help"])
    except SystemExit as exit_:
        assert exit_.code == 0, command

from distprune.cli.app import app
for name in ["", *app.commands]:
    if name != "selftest":  # which tests torch
        helps(*filter(None, [name]))
helps("recipe", "show")
heavy = {"torch", "numpy", "matplotlib", "safetensors"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_teaches_and_does_not_import_torch():
    code, out, err = end_of(start("-c", HELPS, NO_COLOR="1"))
    assert code == 0, err
    assert "\x1b[3" not in out
    for word in ("Usage: distprune", "Exit codes", "recipe show"):
        assert word in out


def test_the_help_of_prune_fits_a_screen_and_begins_with_what_is_needed():
    arguments = {"prog_name": "distprune", "terminal_width": 100}
    lines = CliRunner().invoke(app, ["prune", "--help"], **arguments).output.splitlines()
    assert len(lines) <= 60 and lines[0] == "Usage: distprune prune [OPTIONS] SRC DST"
    first = lines[lines.index("Options:") + 1 : lines.index("More:")]
    names = ["--recipe", "--sparsity", "--pattern", "--text", "--eval"]
    assert not {"  SRC", "  DST"} & set(lines)
    assert [re.search("--[a-z]+", line)[0] for line in first if "--" in line] == names


def test_every_key_of_a_recipe_is_an_option():
    options = {name for option in prune.params for name in option.opts}
    keys = set(Recipe.model_fields) - {"schedule", "names", "groups"}
    assert {option_name(key) for key in keys} <= options


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["bogus"], "No such command"),
        (["recipe", "show"], "Missing argument"),
        (["recipe", "show", "nope"], "expected a YAML file, or one of by_kind_of_layer, cubic"),
    ],
)
def test_a_wrong_command_is_exit_code_2_and_a_message_on_stderr(run, arguments, expected):
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert expected in done.err


def test_shipped_recipes_are_listed_shown_and_valid(run):
    listed = [line.split()[0] for line in run("recipe", "ls").out.splitlines()[1:]]
    assert listed == [*shipped_recipes()] and len(listed) == 12
    for name in listed:
        text = run("recipe", "show", name).out
        assert yaml.safe_load(text) == load_recipe(shipped_recipes()[name]).as_values()


def test_the_schema_has_the_keys_of_recipes():
    schema = Recipe.model_json_schema()
    assert set(schema["properties"]) == set(Recipe.model_fields)
    assert schema["additionalProperties"] is schema["$defs"]["GroupRecipe"]["additionalProperties"]


def test_numbers_are_not_rounded_to_what_they_are_not():
    parts = ((1, 10**9), (10**9 - 1, 10**9), (0, 3), (3, 3), (0, 0))
    shares = [format_percent(part, whole) for part, whole in parts]
    assert shares == ["0.01 %", "99.99 %", "0.00 %", "100.00 %", "-"]
    sizes = [format_size(n) for n in (999, 1500, 3e9, 2e12)]
    assert sizes == ["999 B", "1.5 kB", "3.0 GB", "2.0 TB"]


# No traceback where the machine, a file or the user is the cause; no code of others is run.


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
    for command in every(2, (["inspect", source, "-v"], ["prune", "--help"], ["recipe", "ls"])):
        code, _, err = run_process(*command, shell='"$@" | true')
        assert (code, err) == (1, ""), command
    # The work does not depend on who reads the notes on stderr.
    command = ["prune", source, tmp_path / "out", "-s", "0.5"]
    code, out, _ = run_process(*command, shell='{ "$@" 2>&1 >&3 | true; } 3>&1')
    assert code == 0 and "Pruned 1,280" in out
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.thorough)])
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


def trace(folder):
    path = folder.parent / "ran"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("command", [["--version"], ["plan", ".", "-s", "0.5"]])
def test_python_m_distprune_does_not_import_them(trap, command):
    if command == ["--version"]:
        subprocess.run([sys.executable, "-c", "import torch"], cwd=trap, env=environment())
        assert trace(trap) == "torch "
        (trap.parent / "ran").unlink()
    code, _, err = run_process(*command, cwd=trap)
    assert (code, trace(trap)) == (0, ""), err
