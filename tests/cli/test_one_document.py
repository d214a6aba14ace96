"""--json writes one JSON document to stdout, on the first rank."""

import json

import pytest
import torch

from helpers.tiny_checkpoints import save

CASES = [
    (0, ["plan", "SRC"]),
    (0, ["plan", "SRC", "-s", "0.5"]),
    (0, ["prune", "SRC", "OUT", "-s", "0.5"]),
    (0, ["prune", "SRC", "OUT", "-s", "0.5", "-v", "-q"]),
    (0, ["apply", "PRUNED", "SRC", "OUT", "-v"]),
    (0, ["inspect", "SRC", "-v"]),
    (0, ["verify", "PRUNED", "--against", "SRC", "-v"]),
    (0, ["diff", "SRC", "PRUNED", "-v"]),
    (0, ["env", "SRC"]),
    (3, ["verify", "CHANGED", "--against", "SRC"]),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    tensors = {f"layers.{i}.weight": torch.randn(8, 8).bfloat16() for i in range(3)}
    source = save(folder / "source", tensors)
    from distprune.cli.main import main

    for name in ("pruned", "changed"):
        with pytest.raises(SystemExit):
            main(["prune", str(source), str(folder / name), "-s", "0.5", "-q"])
    path = folder / "changed" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x77")
    return {"SRC": source, "PRUNED": folder / "pruned", "CHANGED": folder / "changed"}


@pytest.mark.parametrize(("code", "command"), CASES)
def test_of_each_command(run, folders, tmp_path, code, command):
    places = folders | {"OUT": tmp_path / "out"}
    done = run(*(places.get(each, each) for each in command), "--json")
    assert done.code == code, done.err
    document = json.loads(done.out)
    if code:
        assert document["is_good"] is False and document["problems"]


def test_other_ranks_of_torchrun_write_none(run, folders, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    done = run("plan", folders["SRC"], "-s", "0.5", "--json")
    assert (done.code, done.out) == (0, "")
