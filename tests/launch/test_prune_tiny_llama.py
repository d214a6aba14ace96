"""The main job from its script to its files, with so few steps that it takes seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.sampling import every

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "num_ranks"), every(2, [("fsdp2", 2), ("tp", 2)]))
def test_a_short_run(tmp_path, wrap, num_ranks):
    arguments = ["--steps", "2", "--finetune-steps", "1", "--sparsities", "0.5", "0.9"]
    arguments += ["--held-out-windows", "20"]
    done = subprocess.run(
        [
            "sh",
            ROOT / "launch/prune_tiny_llama.sh",
            "--wrap",
            wrap,
            *arguments,
            "--output",
            tmp_path,
        ],
        env={**os.environ, "NPROC": str(num_ranks), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["num_ranks"] == num_ranks
    assert len(results["mask_comparisons"]) == 4
    assert all(found["num_differing"] == 0 for found in results["mask_comparisons"])
    assert all(found["num_compared"] >= 802_816 for found in results["mask_comparisons"])
    assert results["saved_model_faults"] == []
    for name in ("results.md", "loss_over_sparsity.png", "sparsity_per_layer.png", "model"):
        assert (tmp_path / name).exists()
