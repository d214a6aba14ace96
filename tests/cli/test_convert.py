"""``distprune convert``: its messages, and that its result can be pruned."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from commands import environment

from distprune.files.checkpoints.checkpoint import open_checkpoint


class Runs:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    weight = torch.randn(8, 8)
    state = {"layers.0.weight": torch.randn(8, 8), "wte.weight": weight, "lm_head.weight": weight}
    torch.save({"state_dict": state, "epoch": 1}, folder / "pytorch_model.bin")
    return folder


def test_what_plan_advises_works(run, source, tmp_path):
    (source / "2_Dense").mkdir()
    torch.save({"linear.weight": torch.ones(2, 2)}, source / "2_Dense" / "pytorch_model.bin")
    refused = run("plan", source, "-s", "0.5")
    assert refused.code == 3 and f"distprune convert {source} NEW." in refused.err
    done = run("convert", source, tmp_path / "new")
    assert done.code == 0
    assert "3 tensors (768 B) in 1 safetensors file, 2 other files copied." in done.out
    assert "Copied, not converted: 2_Dense/pytorch_model.bin." in done.err
    assert "weights are those of 'state_dict'; left out: epoch." in done.err
    assert "One tensor, written under each of its names: wte.weight, lm_head.weight." in done.err
    assert run("prune", tmp_path / "new", tmp_path / "pruned", "-s", "0.5").code == 0
    assert len(open_checkpoint(tmp_path / "pruned").tensors) == 3


def test_json_is_one_document(run, source, tmp_path):
    done = run("convert", source, tmp_path / "new", "--json", "-q")
    assert done.code == 0 and done.err == ""
    assert done.json["files"] == {"pytorch_model.bin": "model.safetensors"}
    assert done.json["tied"] == [["wte.weight", "lm_head.weight"]]
    assert done.json["copied"] == ["config.json"] and done.json["not_copied"] == {}
    assert done.json["copied_not_converted"] == []


def test_exit_codes(run, source, tmp_path):
    assert run("convert", source, source / "new").code == 4
    assert run("convert", source, source).code == 4
    assert run("convert", tmp_path / "none", tmp_path / "new").code == 3
    torch.save({"x": Runs()}, source / "pytorch_model.bin")
    done = run("convert", source, tmp_path / "new")
    assert done.code == 3 and "posix.system" in done.err
    assert len(done.err.splitlines()) == 1 and "Traceback" not in done.err


@pytest.mark.thorough
@pytest.mark.slow
def test_a_signal_leaves_nothing(source, tmp_path):
    torch.save({f"w{i}": torch.ones(1 << 22) for i in range(6)}, source / "pytorch_model.bin")
    process = subprocess.Popen(
        [sys.executable, "-m", "distprune", "convert", str(source), str(tmp_path / "new")],
        env=environment(), stderr=subprocess.PIPE,
    )  # fmt: skip
    partial = tmp_path / "new.partial-convert"
    while process.poll() is None and not (partial / "model.safetensors").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert b"nothing was kept" in err
    assert [name for name in os.listdir(tmp_path) if name.startswith("new")] == []
