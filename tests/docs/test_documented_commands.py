"""Every command of the documentation and of --help runs, on small checkpoints of these names."""

import os
import re
import shlex
import shutil

import pytest
from examples_of_pages import ROOT, commands_of, pages
from small_commands import MODELS, PRUNED, exit_code_of, made_small, write_sources

from distprune.cli.app import app

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

SHELL = [page for page in pages() if any(commands_of(page))]
DIFFERENT = 3  # diff --exit-code
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
    write_sources(folder)
    return folder


RUN = set()  # commands that have run in this process, with one name for all copies of a model


def ours(arguments):
    """Run a command of distprune to its end, made small, in this process, unless it has run.

    Other tests start several processes by torchrun.
    """
    names = {**dict.fromkeys(MODELS, MODELS[0]), **dict.fromkeys(PRUNED, PRUNED[0])}
    command = tuple(names.get(word, word) for word in arguments)
    if command in RUN:
        return
    RUN.add(command)
    code = exit_code_of(made_small(arguments))
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
    texts = [each.help for each in app.commands.values()]
    lines = re.findall(r"^ +((?:distprune|torchrun) .*)$", "\n".join(texts), re.MULTILINE)
    assert len(lines) >= 15
    for line in lines:
        words = shlex.split(line, comments=True)
        run_or_say_why_not(words[: words.index("&&")] if "&&" in words else words)
