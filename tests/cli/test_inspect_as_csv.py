"""``inspect --csv``: a row for each tensor, whatever the names are."""

import csv
import io
import json

import pytest
import torch
from commands import start

from distprune.cli.inspect import CSV_COLUMNS
from helpers.tiny_checkpoints import save

HOSTILE = ['a,"b"', "two\nlines", "\x1b]0;title\x07", "=HYPERLINK(1)", "back\\slash", "日本", "@x"]


def rows_of(text):
    assert text.endswith("\n") and "\r" not in text
    return list(csv.DictReader(io.StringIO(text)))


def test_one_row_for_each_tensor(run, tmp_path):
    made = {
        "model.layers.3.mlp.up_proj.weight": torch.tensor([[0.0, 1, -0.0], [float("nan"), 2, 0]]),
        "logit_scale": torch.tensor(1.0),
        "empty": torch.ones(0, 3),
    }
    source = save(tmp_path / "source", made, {"ids": torch.arange(4)})
    path = tmp_path / "sparsity.csv"
    done = run("inspect", source, "--csv", path)
    assert done.code == 0 and "logit_scale" in done.out
    rows = rows_of(path.read_text())
    first = "model-00001-of-00002.safetensors"
    wanted = [
        ["model.layers.3.mlp.up_proj.weight", first, "F32", "2x3", "6", "3", "0.5", "1", "0", "",
         "model.layers.3", "mlp.up_proj"],
        ["logit_scale", first, "F32", "scalar", "1", "0", "0.0", "0", "0", "", "", "logit_scale"],
        ["empty", first, "F32", "0x3", "0", "0", "", "0", "0", "", "", "empty"],
        ["ids", first.replace("1-", "2-"), "I64", "4", "4", "1", "0.25", "0", "0", "", "", "ids"],
    ]  # fmt: skip
    assert [list(row.values()) for row in rows] == wanted and tuple(rows[0]) == CSV_COLUMNS
    done = run("inspect", source, "--csv", "-")
    assert done.out == path.read_text()


def test_names_cannot_break_out_of_their_cell(run, tmp_path):
    made = {name: torch.zeros(2) for name in HOSTILE}
    done = run("inspect", save(tmp_path / "source", made), "--csv", "-")
    rows = rows_of(done.out)
    assert len(rows) == len(HOSTILE) == len(done.out.splitlines()) - 1
    assert all(line.isprintable() for line in done.out.splitlines())
    names = [row["name"] for row in rows]
    assert not any(cell.startswith(("=", "+", "-", "@")) for row in rows for cell in row.values())
    undone = [n.encode("latin-1", "backslashreplace").decode("unicode_escape") for n in names]
    assert undone == HOSTILE


@pytest.mark.slow
def test_a_terminal_without_unicode_shows_escapes(tmp_path):
    source = save(tmp_path / "source", {"日.weight": torch.ones(1)})
    process = start("-m", "distprune", "inspect", source, "--csv", "-", PYTHONIOENCODING="ascii")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and err == ""
    assert out.splitlines()[1].startswith("\\u65e5.weight,model.safetensors,F32,1,1,0,0.0")


def test_a_pruned_checkpoint_tells_what_was_pruned(run, tmp_path):
    made = {"a.weight": torch.tensor([[0.0, 0], [0, 1]]), "b.weight": torch.ones(2, 2)}
    source = save(tmp_path / "source", {**made, "norm": torch.zeros(2)})
    out = tmp_path / "out"
    assert run("prune", source, out, "-s", "0.5", "--scope", "layer").code == 0
    rows = {row["name"]: row for row in rows_of(run("inspect", out, "--csv", "-").out)}
    assert {name: (row["zeros"], row["pruned"]) for name, row in rows.items()} == {
        "a.weight": ("3", "2"), "b.weight": ("2", "2"), "norm": ("2", "0"),
    }  # fmt: skip
    report = out / "distprune" / "report.json"
    report.write_text(json.dumps({"schema": 9}))
    done = run("inspect", out, "--csv", "-")
    assert done.code == 0 and "pruned" in done.err
    assert {row["pruned"] for row in rows_of(done.out)} == {""}


def test_what_cannot_be_written_is_said_before_anything_is_read(run, tmp_path, monkeypatch):
    source = save(tmp_path / "source", {"a": torch.ones(2)})
    monkeypatch.setattr("distprune.files.inspecting.inspect", None)
    assert run("inspect", source, "--csv", tmp_path / "none" / "a.csv").code == 4
    assert run("inspect", source, "--csv", tmp_path).code == 4
    done = run("inspect", source, "--csv", "-", "--json")
    assert done.code == 2 and "--csv" in done.err
