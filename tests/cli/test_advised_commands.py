"""What a message advises works: the message is shown, and the command that it names is run."""

import ast
import re
import shlex

import pytest
import torch

from distprune.cli.app import app
from helpers.forked_scripts import ROOT
from helpers.tiny_checkpoints import save, tree_digest
from helpers.tiny_language_model import save_tiny_llama, write_text

TENSORS = {f"layers.{n}.mlp.weight": torch.randn(8, 12) for n in range(2)}


@pytest.fixture
def source(tmp_path):
    return save(tmp_path / "source", TENSORS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(a folder with a language model, statistics of it, a text)."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models")
    text = write_text(folder / "a.txt", 200)
    return save_tiny_llama(folder / "llama"), folder / "stats.safetensors", text


def said(done, *texts, code=None):
    """What a command wrote, which has these texts in it."""
    written = " ".join((done.out + done.err).split())
    assert all(text in written for text in texts), written
    assert code is None or done.code == code, written
    return written


def works(done):
    assert done.code == 0, done.out + done.err
    return done


def test_what_a_score_is_made_from(run, llama, source, tmp_path):
    model, statistics, text = llama
    for wanda in (["--score", "wanda", "-s", "0.5"], ["-r", "wanda_row_50"]):
        done = run("plan", model, *wanda)
        said(done, "expected --statistics FILE", "`distprune calibrate`", code=2)
        options = ["--text", text, "--length", "16", "--device", "cpu", "--out", statistics]
        works(run("calibrate", model, *options))
        works(run("plan", model, *wanda, "--statistics", statistics))
    fisher = ["plan", model, "--score", "fisher", "-s", "0.5"]
    said(run(*fisher), "expected --statistics FILE", "`distprune calibrate --gradients`", code=2)
    works(run("calibrate", model, *options, "--gradients"))
    works(run(*fisher, "--statistics", statistics))
    wanda = ["plan", model, "--score", "wanda", "-s", "0.5", "--statistics", statistics]
    said(run(*wanda), "`distprune calibrate` without --gradients", code=1)
    works(run("calibrate", model, *options))
    works(run(*wanda))
    taylor = ["plan", model, "--score", "taylor", "-s", "0.5"]
    said(run(*taylor), "expected --scores FOLDER", "--text FILE makes them", code=2)
    works(run(*taylor, "--text", text, "--length", "16", "--windows", "2"))
    given = ["--score", "given", "-s", "0.5"]
    said(run("plan", source, *given), "expected --scores FOLDER", code=2)
    scores = save(tmp_path / "scores", {name: torch.randn(8, 12) for name in TENSORS})
    works(run("prune", source, tmp_path / "out", *given, "--scores", scores))
    verify = ["verify", tmp_path / "out", "--against", source]
    said(run(*verify), "expected --scores FOLDER", code=1)
    works(run(*verify, "--scores", scores))
    works(run("prune", source, tmp_path / "other", "-s", "0.5"))
    verify = ["verify", tmp_path / "other", "--against", source]
    said(run(*verify, "--scores", scores), "leave --scores out", code=1)
    works(run(*verify))


@pytest.mark.parametrize("has_scores", [False, True])
def test_the_commands_of_a_model_card(run, source, tmp_path, monkeypatch, has_scores):
    scores = save(tmp_path / "SCORES", {name: torch.randn(8, 12) for name in TENSORS})
    given = ["--scores", scores] if has_scores else []
    works(run("prune", source, tmp_path / "out", "-s", "0.5", *given))
    card = (tmp_path / "out" / "README.md").read_text()
    block = card.partition("```bash\n")[2].partition("```")[0]
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [words[:2] for words in commands] == [["distprune", "prune"], ["distprune", "verify"]]
    monkeypatch.chdir(tmp_path / "out")
    places = {"SRC": source, "DST": tmp_path / "again", "SCORES": scores}
    for words in commands:
        works(run(*(places.get(word, word) for word in words[1:])))
    run_facts = ("distprune/report.json",)
    assert tree_digest(tmp_path / "out", run_facts) == tree_digest(tmp_path / "again", run_facts)


def test_extras_that_messages_name_exist():
    text = (ROOT / "pyproject.toml").read_text()
    known = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^([\w-]+) = ", known, re.MULTILINE))
    written = " ".join(text for _place, text in texts_of_the_package())
    named = set(",".join(re.findall(r"distprune\[([\w,-]+)\]", written)).split(","))
    assert "cli" in named and named <= extras


def texts_of_the_package():
    """(place, text) of every string in the code of the package, without docstrings."""
    for path in sorted((ROOT / "distprune").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        nodes = [tree]
        while nodes:
            node = nodes.pop()
            text = _text(node)
            if text is None:
                nodes += ast.iter_child_nodes(node)
            elif id(node) not in docstrings:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def _text(node):
    """A string, with names in the place of values; None for any other node."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value) or f"{{{ast.unparse(value.value)}}}" for value in values)
    return None


# Options of launchers and other programs, and of the self-test, which has a parser of its own.
OF_OTHERS = {
    "--multi_gpu", "--nproc-per-node", "--num_machines", "--num_processes",
    "--cpu", "--json", "--timeout",
}  # fmt: skip


def test_every_command_and_option_that_a_text_names_exists():
    commands = app.commands
    known = {"--help", "--version"} | OF_OTHERS
    for command in commands.values():
        for parameter in command.params:
            known |= {*parameter.opts, *parameter.secondary_opts}
    for place, text in texts_of_the_package():
        options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*\w(?![\w-])", text))
        assert options <= known, (place, text)
        assert {*re.findall(r"`distprune ([\w-]+)", text)} <= commands.keys(), (place, text)
