"""What commands write: tables, JSON documents, files that are not copied; what verify lists."""

import json

import pytest
import torch

from helpers.tiny_checkpoints import file_bytes, save

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
    assert run("prune", source, tmp_path / "bare", "-s", "0.5", "--no-masks").code == 0
    (tmp_path / "file").write_text("x")
    expected = {
        "told": "was made by `distprune apply`",
        "bare": "was pruned without masks",
        "source": "has no report",
        "file": "has no report",
        "nowhere": "has no report",
    }
    for name, text in expected.items():
        done = run("verify", tmp_path / name, "--against", source)
        assert done.code == 1 and text in done.err and done.out == "", name
        assert "Traceback" not in done.err
