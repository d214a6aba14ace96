"""The table of language models: all methods on a tiny model, as on a large one."""

import json
import runpy
import sys
import types

import pytest
import torch
from safetensors.torch import load_file
from shell import ROOT

sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))

import language_model_table as table

from distprune.cli import main as distprune
from helpers.tiny_language_model import save_tiny_llama, tiny_llama, write_text

CELLS = [f"{s}:{m}" for s in ("0.5", "2:4") for m in table.METHODS] + ["0.8:taylor/layer"]
SIZE = ["--windows", 3, "--length", 32]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model with texts; programs run in this process, and llm-compressor is a stand-in."""
    monkeypatch.setattr(table, "run", lambda *command: run(monkeypatch, [str(c) for c in command]))
    save_tiny_llama(tmp_path / "gemma-3-270m", initializer_range=0.2)
    (tmp_path / "peer-python").touch()
    for seed, name in enumerate(["docstrings_train.txt", *table.TEXTS]):
        write_text(tmp_path / name, 900, seed=seed)
    return tmp_path


def run(monkeypatch, command):
    if command[:3] == list(table.DISTPRUNE):
        with pytest.raises(SystemExit) as done:
            distprune(command[3:])
        assert not done.value.code, command
        return
    assert command[0].endswith("peer-python")
    pruning = {n: lambda name=n, **given: {"name": name, **given} for n in table.PEERS.values()}
    for name, module in {
        "datasets": {"Dataset": types.SimpleNamespace(from_dict=dict)},
        "llmcompressor": {"oneshot": at_random},
        "llmcompressor.modifiers": {"pruning": types.SimpleNamespace(**pruning)},
    }.items():
        made = types.ModuleType(name)
        vars(made).update(module)
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.setattr(sys, "argv", command[1:])
    runpy.run_path(command[1], run_name="__main__")


def at_random(model, dataset, recipe, num_calibration_samples, max_seq_length, **_):
    """In place of llm-compressor: half of each row, others for every modifier and pattern."""
    assert num_calibration_samples == len(dataset["input_ids"]) == 6 and max_seq_length == 32
    (given,) = recipe
    assert given["mask_structure"] in ("0:0", "2:4") and given["sparsity"] == 0.5
    draw = torch.Generator().manual_seed(len(given["name"]) + 10 * int(given["mask_structure"][0]))
    save = model.save_pretrained
    model.save_pretrained = lambda folder, save_compressed: save(folder)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            order = torch.rand(module.weight.shape, generator=draw).argsort(dim=1)
            module.weight.data.scatter_(1, order[:, : order.shape[1] // 2], 0)


def fill(monkeypatch, folder, *more, cells=CELLS):
    """Run the script; the rows."""
    results = folder / "rows.jsonl"
    given = [
        "script", "--model", "gemma-3-270m", "--folder", folder, "--results", results, *SIZE,
        "--steps", 2, "--evaluation-windows", 3, "--peer-python", folder / "peer-python", "--cells",
        ",".join(cells), *more,
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", list(map(str, given)))
    settings = table.parse_settings()
    for name in settings.model:
        table.Table(name, settings).fill()
    return [json.loads(line) for line in results.read_text().splitlines()]


def test_every_method_is_measured_once(folder, monkeypatch, capsys):
    fill(monkeypatch, folder, cells=CELLS[:2])
    results = folder / "rows.jsonl"
    text = results.read_text()
    results.write_text(text[:-20])  # a run that was killed in its last line
    (work,) = folder.glob("*-table-*")
    (work / "0.8-taylor-layer.unfinished").mkdir()  # of a killed run
    rows = fill(monkeypatch, folder)
    assert [row["method"] for row in rows if row["cpu_seconds"] is None] == ["taylor/layer"]
    assert results.read_text().startswith(text[: text[:-20].rindex("\n")])
    found = {table.key_of(row)[1:]: row["texts"] for row in rows}
    assert len(found) == len(rows) == 1 + 2 * (1 + 4 * 2) + 1
    assert len({str(texts) for texts in found.values()}) == len(rows)
    for texts in found.values():
        assert [len(losses) for losses in texts.values()] == [3, 3, 3]

    with pytest.raises(SystemExit, match="or another file as --results"):
        fill(monkeypatch, folder, "--steps", 3)
    with pytest.raises(SystemExit):
        fill(monkeypatch, folder, cells=["0.5:unknown"])
    assert "expected cells such as 0.5:own" in capsys.readouterr().err
    (folder / "peer-python").unlink()
    with pytest.raises(SystemExit):
        fill(monkeypatch, folder)
    assert "wanda needs llm-compressor; expected `make peers`" in capsys.readouterr().err


def test_the_polish_is_that_of_the_command(folder, monkeypatch):
    """The command makes in one go what the table makes in two."""
    tiny_llama().bfloat16().save_pretrained(folder / "gemma-3-270m")
    fill(monkeypatch, folder, "--steps", 6, cells=["0.5:magnitude/row"])
    made = table.Table("gemma-3-270m", table.parse_settings())
    texts = [made.windows_of(source) for source in ("docstrings", "own")]
    command = made.command("0.5", "docstrings+own", texts, folder / "pruned")
    table.run(*command)
    place = command.index("--polish") + 1
    table.run(*command[:5], folder / "polished", *command[6:place], 6, *command[place + 1 :])
    model = made.load(folder / "pruned")
    made.polish(model, texts)
    before, expected = (load_file(folder / n / "model.safetensors") for n in ("pruned", "polished"))
    for name, values in model.state_dict().items():
        assert values.equal(expected[name]), name
    assert any(not before[name].equal(expected[name]) for name in before)
