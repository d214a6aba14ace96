"""Help and tables fit terminals of 80 columns; no word of the help is broken."""

import os
import pty
import re
import subprocess
import sys

import pytest
from commands import ROOT, environment, start
from rich.cells import cell_len

from distprune.cli import console

HELPS = """
import os, sys
from distprune.cli.main import main
from distprune.cli.app import make_app
import typer.main
root = typer.main.get_command(make_app())
commands = [[], *([each] for each in root.commands if each != "selftest")]
commands += [["recipe", each] for each in ("ls", "show", "schema")]
for columns in (300, 80):
    os.environ["COLUMNS"] = str(columns)
    import typer.rich_utils
    typer.rich_utils.MAX_WIDTH = columns
    for command in commands:
        print("=====", columns, *command, flush=True)
        try:
            main([*command, "--help"])
        except SystemExit as exit_:
            assert exit_.code == 0, command
        sys.stdout.flush()
"""


def words(text):
    return re.sub(r"[│╭╮╰╯─]", " ", text).split()


def test_help():
    process = start("-c", HELPS, NO_COLOR="1", TERM="dumb", PYTHONIOENCODING="utf-8")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    pages = re.split(r"^=====", out, flags=re.MULTILINE)[1:]
    wide = {page.split("\n")[0].replace(" 300", ""): page for page in pages if " 300" in page[:5]}
    narrow = {page.split("\n")[0].replace(" 80", ""): page for page in pages if " 80" in page[:5]}
    assert len(wide) == len(narrow) > 10
    for command, page in narrow.items():
        lines = page.split("\n")[1:]
        assert not [line for line in lines if cell_len(line) > 80], command
        assert any(cell_len(line) > 100 for line in wide[command].split("\n")), command
        broken = set(words(page)) - set(words(wide[command]))
        assert broken <= {"80"}, command
        # Examples can be copied.
        examples = [" ".join(each.split()) for each in wide[command].split("\n")]
        for example in examples:
            if example.startswith(("distprune ", "torchrun ")):
                assert example in [" ".join(each.split()) for each in lines], example


def test_wide_characters_are_aligned():
    rows = [("模型.слой", "1"), ("b", "22")]
    lines = list(console.layout(("tensor", "n"), rows, right=("n",)))
    assert lines == ["tensor      n", "模型.слой   1", "b          22"]
    assert {cell_len(line) for line in lines} == {13}


def test_tables_without_rows():
    assert list(console.layout(("a", "bc"), [])) == ["a  bc"]


@pytest.mark.parametrize("columns", [80, 60])
def test_on_a_terminal(columns):
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "distprune", "recipe", "ls"]
    variables = environment(COLUMNS=str(columns), TERM="xterm", NO_COLOR="1")
    process = subprocess.Popen(command, stdout=slave, env=variables, cwd=ROOT)
    os.close(slave)
    text = b""
    while True:
        try:
            piece = os.read(master, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        text += piece
    assert process.wait(timeout=60) == 0
    lines = re.sub(r"\x1b\[[0-9]*m", "", text.decode()).splitlines()
    assert len(lines) > 5 and max(map(len, lines)) <= columns
    assert b"\x1b[1mrecipe" in text
