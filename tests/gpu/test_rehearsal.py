"""What runs on a GPU runs on a CPU too, and loses nothing when a stage fails or hangs."""

import argparse
import faulthandler
import json
import os
import subprocess
import sys
from pathlib import Path

import on_ranks
import pytest
import run_stages
import torch

HERE = Path(__file__).parent


@pytest.mark.thorough
def test_cheap_stages_run_on_a_cpu(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(HERE / "run.sh"), "--device", "cpu", "--out", str(tmp_path)]
    command += ["--stages", "ranking"]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr + (tmp_path / "log.txt").read_text()
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["facts"]["device"] == "cpu" and document["facts"]["quick"]
    assert [each["status"] for each in document["stages"].values()] == ["ok"]
    parts = {
        part["name"]: part["status"]
        for stage in document["stages"].values()
        for part in stage["parts"]
    }
    assert parts["bfloat16 by magnitude"] == "ok"
    text = (tmp_path / "results.txt").read_text()
    assert "a rehearsal" in text and "share of copy" in text
    assert len(list(tmp_path.iterdir())) == 3  # results.json, results.txt, log.txt
    with pytest.raises(SystemExit, match="rehearsal"):
        run_stages.keep(tmp_path, "name")
    assert not (HERE / "results" / "name.json").exists()


# A part that holds, one that does not, one that raises, and one that needs something else.
FOUR_PARTS = """
from stage import NotTried, main
def good(stage): stage.figure("one", 1.0, "s"); stage.check("this", True)
def bad(stage): stage.check("that", False, "at all")
def raising(stage): raise ZeroDivisionError("here")
def untried(stage): raise NotTried("no such device")
main(good, bad, raising, untried)
"""
HANGS = """
import time
from stage import main
def quick(stage): stage.say("was here")
def endless(stage): time.sleep(1000)
main(quick, endless)
"""
DIES = "import os; os._exit(7)"
# One that dies takes no other with it.
APART = """
import os
from stage import main
def first(stage): stage.check("this", True)
def dying(stage): os._exit(9)
def last(stage): stage.check("that", True)
main(first, dying, last, apart=True)
"""


@pytest.mark.thorough
def test_a_stage_that_fails_or_hangs_loses_nothing(tmp_path, monkeypatch):
    texts = {"four": FOUR_PARTS, "hangs": HANGS, "dies": DIES, "apart": APART}
    for name, text in texts.items():
        (tmp_path / f"stage_{name}.py").write_text(text)
    monkeypatch.setattr(run_stages, "HERE", tmp_path)
    monkeypatch.setattr(run_stages, "STAGES", dict.fromkeys(texts, (60, "")))
    given = argparse.Namespace(device="cpu", quick=True)
    known = {"device": "cpu", "quick": True, "date": "today", "commit": None}
    document = {"facts": known, "stages": {}}
    log = tmp_path / "log.txt"
    log.write_text("")
    for name, limit in (("four", 120), ("dies", 120), ("apart", 240)):
        run_stages.run_stage(name, limit, given, document, tmp_path, log)
    # Long enough to import torch on a busy machine; it ends when the second part has begun.
    monkeypatch.setattr(run_stages, "_take_parts", _stop_when_it_hangs(run_stages._take_parts))
    run_stages.run_stage("hangs", 120, given, document, tmp_path, log)
    stages = json.loads((tmp_path / "results.json").read_text())["stages"]
    statuses = [(part["name"], part["status"]) for part in stages["four"]["parts"]]
    assert statuses == [
        ("good", "ok"), ("bad", "failed"), ("raising", "failed"), ("untried", "not tried"),
    ]  # fmt: skip
    assert stages["four"]["parts"][0]["figures"] == {"one": 1.0}
    assert stages["four"]["status"] == "failed: 2 parts"
    assert stages["dies"]["status"].startswith("failed: it ended with code 7")
    statuses = [(part["name"], part["status"]) for part in stages["apart"]["parts"]]
    assert statuses == [("first", "ok"), ("dying", "failed"), ("last", "ok")]
    assert "ended with code 9" in stages["apart"]["parts"][1]["wrong"][0]
    assert stages["apart"]["status"] == "failed: 1 parts"
    assert stages["hangs"]["status"].startswith("failed: stopped after")
    assert [part["status"] for part in stages["hangs"]["parts"]] == ["ok", "not finished"]
    text = (tmp_path / "results.txt").read_text()
    assert "that at all" in text and "ZeroDivisionError: here" in text and "was here" in text


def _stop_when_it_hangs(take_parts):
    def take(stage, path):
        take_parts(stage, path)
        if len(stage["parts"]) == 2:
            started = run_stages.time.monotonic()
            run_stages.time = argparse.Namespace(monotonic=lambda: started + 1000)

    return take


@pytest.fixture(autouse=True)
def _same_clock(monkeypatch):
    monkeypatch.setattr(run_stages, "time", run_stages.time)


@pytest.mark.thorough
def test_nothing_but_torch_and_numpy_is_needed():
    """Not even pytest: the stage that needs it says so."""
    code = f"""
import sys
for name in ("pytest", "hypothesis", "transformers", "accelerate", "safetensors", "yaml", "typer"):
    sys.modules[name] = None
for name in {sorted(run_stages.STAGES)}:
    __import__(f"stage_{{name}}")
"""
    command = [sys.executable, "-c", code]
    subprocess.run(command, env=run_stages.environment(), check=True, timeout=120)


def test_unknown_stages_are_named(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.sh", "--stages", "masks,mask"])
    with pytest.raises(SystemExit):
        run_stages.arguments()
    assert "no stage 'mask'" in capsys.readouterr().err


def test_every_stage_has_a_file_and_a_line_in_the_table():
    table = (HERE / "README.md").read_text()
    for name in run_stages.STAGES:
        assert (HERE / f"stage_{name}.py").exists() and f"| `{name}` |" in table
    assert {path.stem[6:] for path in HERE.glob("stage_*.py")} == set(run_stages.STAGES)


def test_a_device_that_is_not_here_is_named(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SystemExit, match="cuda cannot be used"):
        run_stages.facts("cuda")


def crash(device):
    faulthandler._sigsegv()


def test_a_rank_that_crashes_shows_its_stack():
    with pytest.raises(on_ranks.Crash, match=r"exit code -11(?s:.)*in crash"):
        on_ranks.run_on_ranks(crash, 1, torch.device("cpu"))
