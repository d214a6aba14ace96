"""What commands write: tables, JSON documents, files that are not copied; what verify lists."""

import json
import os

import pytest
import torch

from distprune.cli.console import Terminal
from distprune.files.errors import printable
from helpers.tiny_checkpoints import encode, file_bytes, save

MADE = {f"layers.{i}.weight": torch.eye(8).bfloat16() + 1 for i in range(3)}
COMMANDS = [
    ["plan", "SRC", "-s", "0.5"],
    ["prune", "SRC", "OUT", "-s", "0.5"],
    ["apply", "PRUNED", "SRC", "OUT"],
    ["inspect", "SRC"],
    ["verify", "PRUNED", "--against", "SRC"],
    ["diff", "SRC", "SRC"],
]


@pytest.fixture
def places(run, tmp_path):
    source = save(tmp_path / "source", MADE)
    assert run("prune", source, tmp_path / "pruned", "-s", "0.3", "-q").code == 0
    (source / "pytorch_model.bin").write_bytes(b"dense")  # prune has not seen it
    return {"SRC": source, "PRUNED": tmp_path / "pruned", "OUT": tmp_path / "out"}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_v_lists_every_tensor_and_json_is_one_document(run, places, command):
    command = [places.get(each, each) for each in command]
    text = run(*command, "-v")
    assert "layers.2.weight" in text.out and text.code == 0, text.err
    found = run(*command, "--json", "-q", *(["--force"] if places["OUT"] in command else []))
    assert found.code == text.code and found.err == "" and json.loads(found.out)


def test_short_tables_merge_names_and_masks_are_those_of_the_result(run, places):
    for command in (["plan", places["SRC"], "-s", "0.5"], ["inspect", places["SRC"]]):
        assert "layers.*.weight" in run(*command).out
    rows = [
        [line.split() for line in run(*command, "-v").out.splitlines() if "layers." in line]
        for command in (
            ["prune", places["SRC"], places["OUT"], "-s", "0.3", "--force"],
            ["apply", places["PRUNED"], places["SRC"], places["OUT"], "--force"],
        )
    ]
    assert rows[0] == rows[1] and sum(int(row[2]) for row in rows[0]) == round(0.3 * 192)


def test_files_that_are_not_copied_are_named(run, places):
    for command in COMMANDS[:3]:
        command = [places.get(each, each) for each in command]
        force = ["--force"] if places["OUT"] in command else []
        done = run(*command, *force)
        assert "Not copied: pytorch_model.bin (weights that are not pruned" in done.err
        found = run(*command, *force, "--json", "-q").json
        assert list(found["not_copied"]) == ["pytorch_model.bin"]
        assert {"config.json", "tokenizer.json"} <= set(found["copied"])


def test_other_ranks_of_torchrun_write_nothing(run, places, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    done = run("plan", places["SRC"], "-s", "0.5", "--json")
    assert (done.code, done.out) == (0, "")


def test_diff_compares_tensors_and_not_the_files_that_they_are_in(run, places, tmp_path):
    names = list(MADE)
    second = save(tmp_path / "second", *({n: MADE[n]} for n in names[::-1]))
    path = places["SRC"] / "model.safetensors"
    path.write_bytes(file_bytes(MADE, metadata={"format": "np", "made_by": "x"}))
    assert run("diff", places["SRC"], second, "--exit-code").code == 0


@pytest.fixture
def made(run, tmp_path):
    """(source, result)."""
    torch.manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(9, 16).bfloat16() for i in range(5)}
    source = save(tmp_path / "source", tensors)
    assert run("prune", source, tmp_path / "out", "-s", "0.5").code == 0
    return source, tmp_path / "out"


def damage(folder):
    """Two problems."""
    (folder / "config.json").unlink()
    with (folder / "tokenizer.json").open("a") as file:
        file.write("more")


def test_a_result_is_good_or_all_that_is_wrong_is_listed(run, made):
    source, out = made
    done = run("verify", out, "--against", source)
    assert done.code == 0 and done.err == ""
    assert "360 of 720 elements pruned (50.00 %)" in done.out
    damage(out)
    done = run("verify", out, "--against", source)
    assert done.code == 3 and len(done.out.splitlines()) == 2
    assert "tokenizer.json has " in done.out and "config.json" in done.out
    found = run("verify", out, "--against", source, "--json")
    assert found.code == 3 and found.json["problems"] == done.out.splitlines()
    assert found.json["is_good"] is False and found.json["num_pruned"] == 360


def test_what_prune_did_not_write(run, made, tmp_path):
    source, out = made
    assert run("apply", out, source, tmp_path / "told").code == 0
    (tmp_path / "file").write_text("x")
    expected = {
        "told": "was made by `distprune apply`",
        "source": "has no report",
        "file": "has no report",
        "nowhere": "has no report",
    }
    for name, text in expected.items():
        done = run("verify", tmp_path / name, "--against", source)
        assert done.code == 1 and text in done.err and done.out == "", name
        assert "Traceback" not in done.err


# Names from files cannot command the terminal, hide text or forge lines.


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
        ["recipe", "show", evil],
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
