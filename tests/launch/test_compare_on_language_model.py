"""The table of criteria and scopes: cells are made once, and may be added later."""

import json
import shutil
import sys

import pytest
from shell import ROOT, run

sys.path.insert(0, str(ROOT / "launch"))

from helpers.tiny_language_model import save_tiny_llama, write_text
from language_model.table_settings import parse_settings

SCRIPT = "launch/compare_on_language_model.py"


@pytest.mark.slow
@pytest.mark.thorough
def test_cells_are_made_once_and_added_later(tmp_path):
    save_tiny_llama(tmp_path / "llama")
    train, held_out = (write_text(tmp_path / f"{n}.txt", 900, seed=n) for n in (0, 1))
    table = tmp_path / "table"
    common = [
        tmp_path / "llama", table, "--wrap", "none", "--calibrate", train, "--windows", 3,
        "--length", 32, "--evaluate", held_out, "--evaluation-windows", 2, "--criteria",
        "magnitude", "fisher", "--sparsities", 0.5,
    ]  # fmt: skip
    recovery = ["--recover", train, "--recovery-steps", 2, "--recovery-batch", 2]
    status, printed = run(SCRIPT, *common, "--scopes", "global", "2:4", *recovery)
    assert status == 0, printed
    made = {file: file.stat().st_mtime_ns for file in table.rglob("cells/*.json")}
    assert len(made) == 8

    status, printed = run(SCRIPT, *common, "--scopes", "owl", "2:4", *recovery)
    assert status == 0, printed
    assert {file: file.stat().st_mtime_ns for file in made} == made
    results = json.loads((table / "results.json").read_text())
    found = {(cell["criterion"], cell["scope"]): cell for cell in results["cells"]}
    assert found.keys() == {
        (c, s) for c in ("magnitude", "fisher") for s in ("global", "2:4", "owl")
    }
    assert {cell["num_pruned"] for cell in found.values()} == {2176}
    # Every cell begins with the model as it was: the dense one, and other prunings, left nothing.
    assert len({cell["all"]["nll"] for cell in found.values()}) == 6
    lines = (table / "results.md").read_text().splitlines()
    head = next(line for line in lines if line.startswith("| sparsity"))
    assert [name.strip() for name in head.split("|")[2:-1]] == ["global", "2:4", "owl"]

    status, printed = run(SCRIPT, *common, "--scopes", "global", "--updates", "least-squares",
                          "rounds", *recovery[:0])  # fmt: skip
    assert status == 0, printed
    results = json.loads((table / "results.json").read_text())
    moved = {(c["criterion"], c["update"]): c for c in results["cells"] if c["update"] != "none"}
    assert moved.keys() == {
        ("magnitude", "least-squares"), ("fisher", "least-squares"), ("fisher", "rounds"),
    }  # fmt: skip
    assert {cell["num_pruned"] for cell in moved.values()} == {2176}
    # One round is one shot.
    once, again = moved["fisher", "least-squares"], moved["fisher", "rounds"]
    assert once["all"]["nll"] == pytest.approx(again["all"]["nll"], rel=1e-6)
    assert once["all"]["nll"] != found["fisher", "global"]["all"]["nll"]

    rounds = [*common, "--scopes", "global", "--updates", "rounds"]
    status, printed = run(SCRIPT, *rounds, "--rounds-before", 0.25)
    assert status == 1 and "made after rounds of []" in printed
    (table / "cells" / "fisher_global_50_rounds.json").unlink()
    status, printed = run(
        SCRIPT, *rounds, "--rounds-before", 0.25, "--more-text", train, "--more-windows", 2
    )
    assert status == 0, printed
    results = json.loads((table / "results.json").read_text())
    (later,) = (cell for cell in results["cells"] if cell["update"] == "rounds")
    assert later["rounds"] == [0.25] and later["num_pruned"] == 2176
    assert later["all"]["nll"] != again["all"]["nll"]
    (more,) = results["more_text"]
    assert [(text["text"], text["num_windows"]) for text in more["texts"]] == [(str(train), 2)]
    assert "the first from 25 %" in (table / "results.md").read_text()

    # A run that was killed in the second round goes on after the first one.
    cell, second = table / "cells" / "fisher_global_50_rounds.json", table / "rounds"
    made = cell.read_bytes()
    cell.unlink()
    shutil.rmtree(second / "fisher_25_50")
    (second / "fisher_25_50.json").unlink()
    (second / "fisher_25.json").write_text("{}")  # what it says is not made again
    status, printed = run(SCRIPT, *rounds, "--rounds-before", 0.25)
    assert status == 0, printed
    assert cell.read_bytes() == made and (second / "fisher_25.json").read_text() == "{}"

    # Other programs are given the same model, text and sparsity.
    names = ["torch", "distprune", "plain_sparse_gpt"]
    status, printed = run("tests/benchmarks/peers_on_language_model.py", *common, "--peers", *names)
    assert status == 0, printed
    assert run(SCRIPT, *common, "--scopes", "2:4")[0] == 0
    results = json.loads((table / "results.json").read_text())
    made = {(c["criterion"], c["scope"]): c for c in results["cells"] if " " in c["criterion"]}
    assert {scope for _, scope in made} == {"global", "layer", "2:4"} and len(made) == 4
    of_torch = made["magnitude (torch.nn.utils.prune)", "global"]
    assert of_torch["num_pruned"] == 2176 and of_torch["cpu_seconds"] > 0
    assert of_torch["all"]["nll"] == found["magnitude", "global"]["all"]["nll"]
    assert made["distprune prune --text", "global"]["num_pruned"] == 2176

    status, printed = run(SCRIPT, *common, "--seed", 1)
    assert status == 1 and "seed was 0 and is 1" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sparsities", "0.5", "1.5"], "expected --sparsities between 0 and 1"),
        (["--sparsities", "0.6", "0.5", "--rounds-before", "0.5"], "got [0.5]"),
        (["--rounds-before", "0.2", "0.1"], "expected --rounds-before that rise"),
        (["--more-windows", "0"], "expected --more-windows >= 1, got 0"),
    ],
)
def test_arguments_that_do_not_fit(capsys, arguments, message):
    with pytest.raises(SystemExit):
        parse_settings(["model", "out", "--calibrate", "a", "--evaluate", "b", *arguments])
    assert message in capsys.readouterr().err


def test_more_text_and_rounds_leave_the_other_cells_as_they_are():
    common = ["model", "out", "--calibrate", "a", "--evaluate", "b"]
    plain = parse_settings(common)
    more = parse_settings([*common, "--more-text", "c", "--rounds-before", "0.2"])
    assert plain.facts() == more.facts() and plain.facts(recovered=True) == more.facts(
        recovered=True
    )
    assert plain.facts(of_more_text=True) != more.facts(of_more_text=True)
