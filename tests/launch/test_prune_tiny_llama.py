"""The main job from its script to its files, with so few steps that it takes seconds."""

import json

import pytest
from shell import ROOT, run


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap", ["fsdp2", *(pytest.param(wrap, marks=pytest.mark.thorough) for wrap in ("tp", "ddp"))]
)
def test_a_short_run(tmp_path, wrap):
    status, printed = run(
        "launch/torchrun.sh", ROOT / "launch/prune_tiny_llama.py", "--wrap", wrap, "--output",
        tmp_path, "--steps", 2, "--finetune-steps", 1, "--sparsities", 0.5, 0.9,
        "--held-out-windows", 20,
    )  # fmt: skip
    assert status == 0, printed
    assert "saved model: as reported" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["num_ranks"] == 2 and results["saved_model_faults"] == []
    assert [found["num_differing"] for found in results["prunings"]] == [0] * 4
    assert all(found["num_compared"] >= 802_816 for found in results["prunings"])
    assert (tmp_path / "model/model.safetensors").exists()
    assert "| 90 % " in (tmp_path / "results.md").read_text()
