"""The table of criteria, scopes and updates: cells are made once, and may be added later."""

import json

import pytest
from shell import ROOT, run

from compare_on_language_model import parse_settings
from helpers.tiny_language_model import save_tiny_llama, write_text

SCRIPT = "launch/compare_on_language_model.py"


@pytest.mark.slow
@pytest.mark.thorough
def test_cells_are_made_once_and_added_later(tmp_path):
    save_tiny_llama(tmp_path / "llama")
    train, *held_out = (write_text(tmp_path / f"{n}.txt", 900, seed=n) for n in range(3))
    table = tmp_path / "table"
    common = [
        tmp_path / "llama", table, "--wrap", "none", "--calibrate", train, "--windows", 3,
        "--length", 32, "--evaluate", *held_out, "--evaluation-windows", 2, "--criteria",
        "magnitude", "fisher", "--sparsities", 0.5,
    ]  # fmt: skip

    def fill(*more):
        status, printed = run(SCRIPT, *common, *more)
        assert status == 0, printed
        return (table / "cells.jsonl").read_text(), json.loads((table / "results.json").read_text())

    lines, _ = fill("--scopes", "global", "2:4")
    assert lines.count("\n") == 1 + 1 + 4  # the facts, the dense model, the cells
    # A run that was killed in the last line makes that cell again, and leaves the others.
    (table / "cells.jsonl").write_text(lines[:-20])
    again, results = fill("--scopes", "owl", "2:4")
    assert again.startswith(lines[: lines[:-20].rindex("\n")])
    cells = {(cell["criterion"], cell["scope"]): cell for cell in results["cells"]}
    scopes = ("global", "2:4", "owl")
    assert cells.keys() == {(c, s) for c in ("magnitude", "fisher") for s in scopes}
    assert {cell["num_pruned"] for cell in cells.values()} == {2176}
    # Every cell begins with the model as it was: the dense one, and other prunings, left nothing.
    assert len({cell["all"]["nll"] for cell in cells.values()}) == 6
    tables = (table / "results.md").read_text()
    assert tables.count("| sparsity, criterion") == 3  # all texts, and each of them
    head = next(line for line in tables.splitlines() if line.startswith("| sparsity"))
    assert [name.strip() for name in head.split("|")[2:-1]] == ["global", "owl", "2:4"]

    _, results = fill("--scopes", "global", "--updates", "least-squares", "rounds")
    moved = {(c["criterion"], c["update"]): c for c in results["cells"] if c["update"] != "none"}
    assert moved.keys() == {
        ("magnitude", "least-squares"), ("fisher", "least-squares"), ("fisher", "rounds"),
    }  # fmt: skip
    # One round is one shot.
    once, in_rounds = moved["fisher", "least-squares"], moved["fisher", "rounds"]
    assert once["all"]["nll"] == pytest.approx(in_rounds["all"]["nll"], rel=1e-6)
    assert once["all"]["nll"] != cells["fisher", "global"]["all"]["nll"]
    _, results = fill("--updates", "rounds", "--rounds-before", 0.25)
    (later,) = (cell for cell in results["cells"] if cell.get("rounds"))
    assert later["rounds"] == [0.25] and later["num_pruned"] == 2176
    assert later["all"]["nll"] != in_rounds["all"]["nll"]

    # Other programs are given the same model, text and sparsity.
    status, printed = run(
        "tests/benchmarks/peers_on_language_model.py", *common, "--peers", "torch", "distprune"
    )
    assert status == 0, printed
    _, results = fill("--scopes", "2:4")
    made = {c["criterion"]: c for c in results["cells"] if " " in c["criterion"]}
    of_torch = made["magnitude (torch.nn.utils.prune)"]
    assert of_torch["num_pruned"] == 2176 and of_torch["cpu_seconds"] > 0
    assert of_torch["all"]["nll"] == cells["magnitude", "global"]["all"]["nll"]
    assert made["distprune prune --text"]["num_pruned"] == 2176

    status, printed = run(SCRIPT, *common, "--seed", 1)
    assert status != 0 and "'seed': 0" in printed and "or another output folder" in printed


def test_the_shipped_arguments_are_read(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert parse_settings(["@configs/gemma_table.args"]).windows == 32
    assert "rounds" in parse_settings(["@configs/gemma_updates.args"]).updates


def test_sparsities_are_shares(capsys):
    with pytest.raises(SystemExit):
        parse_settings(["model", "out", "--calibrate", "a", "--evaluate", "b", "--sparsities", "2"])
    assert "expected --sparsities between 0 and 1" in capsys.readouterr().err
