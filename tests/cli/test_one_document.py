"""--json writes exactly one JSON document to stdout, whatever happens."""

import json
import signal

import pytest
import torch
from commands import start, torchrun

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
    (0, ["recipe", "ls"]),
    (0, ["recipe", "show", "layer_50"]),
    (0, ["recipe", "schema"]),
    (2, []),
    (2, ["bogus"]),
    (2, ["plan"]),
    (2, ["plan", "SRC", "-s", "half"]),
    (2, ["plan", "SRC", "-s", "7"]),
    (2, ["plan", "SRC", "-r", "nope"]),
    (2, ["prune", "SRC", "OUT"]),
    (2, ["inspect", "SRC", "--pattern", "4:2"]),
    (2, ["verify", "PRUNED"]),
    (2, ["env", "no/such/folder"]),
    (2, ["recipe"]),
    (2, ["recipe", "show", "nope"]),
    (2, ["selftest", "--bogus"]),
    (1, ["plan", "no/such/folder", "-s", "0.5"]),
    (1, ["inspect", "OUT"]),
    (1, ["diff", "SRC", "OUT"]),
    (3, ["verify", "CHANGED", "--against", "SRC"]),
    (1, ["verify", "SRC", "--against", "SRC"]),
    (1, ["apply", "SRC", "SRC", "OUT"]),
    (1, ["prune", "SRC", "OTHER", "-s", "0.5"]),
    (1, ["plan", "SRC", "no/such/folder/out", "-s", "0.5"]),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    tensors = {f"layers.{i}.weight": torch.randn(8, 8).bfloat16() for i in range(3)}
    source = save(folder / "source", tensors)
    from distprune.cli.main import main

    for name in ("pruned", "changed", "other"):
        with pytest.raises(SystemExit):
            main(["prune", str(source), str(folder / name), "-s", "0.5", "-q"])
    path = folder / "changed" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x77")
    with pytest.raises(SystemExit):
        main(["prune", str(source), str(folder / "other"), "-s", "0.25", "-q"])
    return {name.upper(): folder / name for name in ("pruned", "changed", "other")} | {
        "SRC": source
    }


@pytest.mark.parametrize(("code", "command"), CASES)
def test_of_each_command(run, folders, tmp_path, code, command):
    places = folders | {"OUT": tmp_path / "out"}
    if "OTHER" in command:  # a name that is taken by something else
        places["OTHER"] = tmp_path
    done = run(*(places.get(each, each) for each in command), "--json")
    assert done.code == code, done.err
    document = json.loads(done.out)
    if code == 0:
        assert "error" not in document
    elif "CHANGED" in command:
        assert document["is_good"] is False and document["problems"]
    else:
        assert document["exit_code"] == code and document["error"]
        assert set(document) == {"exit_code", "error"}


@pytest.mark.parametrize("command", [["plan"], ["bogus"], ["selftest", "--bogus"]])
def test_other_ranks_of_torchrun_write_none(run, monkeypatch, command):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = run(*command, "--json")
    assert (done.code, done.out) == (2, "")
    monkeypatch.setenv("RANK", "0")
    assert run(*command, "--json").json["exit_code"] == 2


def test_of_a_defect(run, folders, tmp_path, monkeypatch):
    monkeypatch.setattr("distprune.files.planning.plan", lambda *_, **__: 1 / 0)
    done = run("prune", folders["SRC"], tmp_path / "out", "-s", "0.5", "--json")
    assert done.code == 1 and done.json["exit_code"] == 1 and "Traceback" in done.err


@pytest.mark.thorough
@pytest.mark.slow
def test_of_several_processes(folders, tmp_path):
    """Ranks that fail; test_prune has those that do not."""
    destination = tmp_path / "out"
    destination.mkdir()
    (destination / "of-another").write_text("x")
    command = ["prune", folders["SRC"], destination, "-s", "0.5", "--json"]
    process = torchrun(2, *command)
    text, err = process.communicate(timeout=200)
    assert process.returncode == 1, err  # of torchrun
    assert json.loads(text)["exit_code"] == 1


@pytest.mark.slow
def test_a_signal_before_the_work(folders):
    process = start(
        "-c",
        "import os, signal\nfrom distprune.files import inspecting\n"
        f"inspecting.inspect = lambda *_, **__: os.kill(os.getpid(), {int(signal.SIGTERM)})\n"
        "from distprune.cli.main import main\nmain()",
        "inspect", folders["SRC"], "--json",
    )  # fmt: skip
    text, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (143, "distprune: terminated.\n")
    assert json.loads(text) == {"exit_code": 143, "error": "terminated."}
