"""Names from files cannot command the terminal, hide text or forge lines."""

import os

import pytest
import torch

from distprune.cli.console import Terminal
from distprune.files.errors import printable
from helpers.tiny_checkpoints import encode, save

EVIL = "layers.0.\x1b]0;owned\x07\x1b[2K\r\u202e\u200f\u2066\x85\x7f\n:bomb:[red].weight"
SEEN = "layers.0.\\x1b]0;owned\\x07\\x1b[2K\\r\\u202e\\u200f\\u2066\\x85\\x7f\\n:bomb:[red].weight"


def dangerous(text):
    return [each for each in text if not each.isprintable() and each != "\n"]


@pytest.fixture
def source(tmp_path):
    weights = torch.randn(8, 8).bfloat16()
    return save(tmp_path / "source", {EVIL: weights, "layers.1.weight": weights})


def test_of_every_command(run, source, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    for command in (
        ["plan", source, "-s", "0.5", "-v"],
        ["prune", source, out, "-s", "0.5", "-v"],
        ["inspect", source, "-v"],
        ["verify", out, "--against", source, "-v"],
        ["apply", out, source, other, "-v"],
        ["diff", source, out],
    ):
        done = run(*command)
        assert done.code == 0, done.err
        assert not dangerous(done.out + done.err), command
        assert SEEN in done.out, command
    found = run("plan", source, "-s", "0.5", "--json")
    assert found.out.isascii() and EVIL in [each["name"] for each in found.json["tensors"]]


def test_of_errors(run, tmp_path, source):
    evil = "\x1b[2J\u202e\ndistprune: all is well"
    bad = {EVIL: {"dtype": "BF16", "shape": [3], "data_offsets": [0, 8]}}
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(encode(bad, bytes(8)))
    integers = save(tmp_path / "integers", {EVIL: torch.ones(4, 4, dtype=torch.int64)})
    for command in (
        ["plan", broken, "-s", "0.5"],
        ["plan", integers, "-s", "0.5", "--include", "*"],
        ["plan", tmp_path / evil, "-s", "0.5"],
        ["plan", source, "-s", "0.5", "-r", evil],
        ["plan", source, "-s", "0.5", "--include", evil],
        ["inspect", source, "--pattern", evil],
        ["env", evil],
    ):
        done = run(*command)
        assert done.code in (1, 2), done.err
        assert not dangerous(done.err), (command, done.err)
        assert not any(line.startswith("distprune: all") for line in done.err.splitlines())


def test_of_file_names(run, source, tmp_path):
    for name in ("\x1b[31m\u202e.gguf", "a\nb.bin", os.fsdecode(b"caf\xe9.onnx")):
        (source / name).touch()
    done = run("plan", source, "-s", "0.5")
    assert done.code == 0 and not dangerous(done.out + done.err)
    for shown in ("\\x1b[31m\\u202e.gguf", "a\\nb.bin", "caf\\udce9.onnx"):
        assert shown in done.err


def test_markup_and_emoji_are_text(capsys):
    terminal = Terminal()
    terminal.text(":bomb: [red]x[/red]")
    terminal.table(("a",), [(":bomb: [red]x[/red]",)])
    terminal.note(":bomb: [red]x[/red]")
    out, err = capsys.readouterr()
    assert (out + err).count(":bomb: [red]x[/red]") == 3


def test_what_is_visible_stays_and_the_rest_is_shown():
    assert printable(EVIL) == SEEN
    for text in ("größe-模型_слой.weight", "back\\slash", "", 'it\'s "quoted"'):
        assert printable(text) == text
    assert printable("caf\udce9 \ud800 \U000e0041 \xa0\u2028") == (
        "caf\\udce9 \\ud800 \\U000e0041 \\xa0\\u2028"
    )
