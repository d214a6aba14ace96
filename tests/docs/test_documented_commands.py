"""Every command of the documentation and of --help runs, on small checkpoints of these names."""

import contextlib
import os
import re
import shlex
import shutil

import pytest
import torch
import typer
from examples_of_pages import ROOT, commands_of, pages

from distprune.cli import app
from distprune.cli.main import main
from distprune.recipe import shipped_recipes
from helpers.tiny_language_model import save_tiny_llama, write_text

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

SHELL = [page for page in pages() if any(commands_of(page))]
MODELS = (
    "llama", "llama-instruct", "Llama-3-8B", "Llama-3.2-1B", "Llama-3.2-1B-Instruct",
    "Llama-3-70B", "MODEL", "SRC", "A", "B", "my-model", "my_scores",
)  # fmt: skip
PRUNED = (
    "llama-50", "Llama-3-8B-50", "Llama-3.2-1B-50", "Llama-3.2-1B-50-tuned", "Llama-3.2-1B-2of4",
    "masks-of-my-run",
)  # fmt: skip
TEXTS = ("train.txt", "held-out.txt", "test.txt", "a.txt", "b.txt")
SMALL = {"--samples": "4", "--limit": "4"}  # the values of these options
LENGTH = "32"
DIFFERENT = 6  # diff --exit-code
# What other tests run: the beginning of a command -> where.
ELSEWHERE = {
    "make": "tests/launch and tests/packaging run what the targets call",
    "pip install": "tests/packaging installs the package and its extras",
    "lm_eval": "needs a network, for the data of its tasks",
    "python -m pytest test_pruning.py": "tests/docs/test_documented_code.py runs this block",
    "python -m distprune selftest": "tests/selftest/test_selftest.py",
    "distprune selftest": "tests/selftest/test_selftest.py",
}
# Programs: the folder -> the tests that run its files.
PROGRAMS = {"examples/": "test_examples.py", "launch/": "test_prune_language_model.py"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with all that commands read."""
    folder = tmp_path_factory.mktemp("files")
    save_tiny_llama(folder / MODELS[0])
    for name in MODELS[1:]:
        shutil.copytree(folder / MODELS[0], folder / name)
    for name in TEXTS:
        write_text(folder / name, 200)
    for name in ("bert-pickled", "bert-base-pickled", "run-7"):
        (folder / name).mkdir()
    weights = {"encoder.0.weight": torch.randn(8, 8)}
    torch.save(weights, folder / "run-7" / "model.pt")
    for name in ("bert-pickled", "bert-base-pickled"):
        torch.save(weights, folder / name / "pytorch_model.bin")
        shutil.copy(folder / "llama" / "config.json", folder / name)
    shutil.copy(shipped_recipes()["layer_50"], folder / "recipe.yaml")
    with contextlib.chdir(folder):
        ours(["prune", "llama", PRUNED[0], "--sparsity", "0.5", "-q"])
        for name in PRUNED[1:]:
            shutil.copytree(PRUNED[0], name)
        ours(["calibrate", "llama", "--text", "a.txt", "--out", "stats.safetensors", "-q"])
    return folder


def ours(arguments):
    """Run a command of distprune to its end, made small, in this process.

    Other tests start several processes by --nproc and torchrun.
    """
    if "--nproc" in arguments:
        place = arguments.index("--nproc")
        arguments = arguments[:place] + arguments[place + 2 :]
    arguments = [
        SMALL.get(before, word) for before, word in zip(["", *arguments], arguments, strict=False)
    ]
    if arguments[0] in ("eval", "calibrate") or "--text" in arguments:
        arguments += ["--length", LENGTH]  # the last one counts
    if "--text" in arguments and arguments[0] in ("prune", "plan"):
        arguments += ["--windows", "4"]
    if arguments[0] in ("prune", "apply", "convert"):
        named = [word for word in arguments[1:] if not word.startswith("-")]
        destination = named[2 if arguments[0] == "apply" else 1]
        shutil.rmtree(destination, ignore_errors=True)  # of an alternative
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    code = caught.value.code
    assert code == 0 or (code == DIFFERENT and "--exit-code" in arguments), arguments


def run_or_say_why_not(words):
    """Run a command of a page, or find the test that does."""
    command = " ".join(words)
    if words[0] == "torchrun" and words[3:5] == ["-m", "distprune"] and words[5] != "selftest":
        ours(words[5:])
    elif words[0] == "distprune" and words[1] != "selftest":
        ours(words[1:])
    elif not any(command.startswith(start) for start in ELSEWHERE) and "selftest" not in words:
        program = [word for word in words if word.endswith(".py")]
        assert program, f"{command}: no test runs it"
        (tests,) = {file for place, file in PROGRAMS.items() if program[0].startswith(place)}
        text = (ROOT / "tests" / "launch" / tests).read_text(encoding="utf-8")
        assert os.path.basename(program[0]) in text, f"{command}: {tests} does not run it"


@pytest.mark.slow
@pytest.mark.parametrize("page", SHELL, ids=lambda page: page.name)
def test_commands_of_pages_run(page, files, tmp_path, monkeypatch):
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for _place, words in commands_of(page):
        run_or_say_why_not(words)


@pytest.mark.slow
def test_examples_of_the_help_run(files, tmp_path, monkeypatch):
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    root = typer.main.get_command(app.make_app())
    texts = [root.epilog, *(each.help for each in root.commands.values())]
    lines = re.findall(r"^ +((?:distprune|torchrun) .*)$", "\n".join(texts), re.MULTILINE)
    assert len(lines) >= 25
    for line in lines:
        words = shlex.split(line, comments=True)
        run_or_say_why_not(words[: words.index("&&")] if "&&" in words else words)
