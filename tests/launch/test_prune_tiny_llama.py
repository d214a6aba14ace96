"""The main job from its script to its files, with so few steps that it takes seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.sampling import every

ROOT = Path(__file__).resolve().parents[2]


def run_job(output, num_ranks, *arguments):
    """Run the job to its end; what it wrote for programs."""
    done = subprocess.run(
        ["sh", ROOT / "launch/prune_tiny_llama.sh", *arguments, "--output", output],
        env={**os.environ, "NPROC": str(num_ranks), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((output / "results.json").read_text())


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "num_ranks"), every(2, [("fsdp2", 2), ("tp", 2)]))
def test_a_short_run(tmp_path, wrap, num_ranks):
    arguments = ["--steps", "2", "--finetune-steps", "1", "--sparsities", "0.5", "0.9"]
    arguments += ["--held-out-windows", "20"]
    results = run_job(tmp_path, num_ranks, "--wrap", wrap, *arguments)
    assert results["num_ranks"] == num_ranks
    assert len(results["mask_comparisons"]) == 4
    assert all(found["num_differing"] == 0 for found in results["mask_comparisons"])
    assert all(found["num_compared"] >= 802_816 for found in results["mask_comparisons"])
    assert results["saved_model_faults"] == []
    for name in ("results.md", "loss_over_sparsity.png", "sparsity_per_layer.png", "model"):
        assert (tmp_path / name).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "num_ranks"), every(2, [("fsdp2", 2), ("tp", 2), ("ddp", 2), ("fsdp2", 1)])
)
@pytest.mark.thorough
def test_a_short_comparison(tmp_path, wrap, num_ranks):
    """Every cell has its exact count, and the masks of a single process."""
    config = f"@{ROOT}/configs/tiny_llama_criteria_quick.args"
    results = run_job(tmp_path, num_ranks, "--wrap", wrap, config)
    settings, cells = results["settings"], results["cells"]
    # Not random numbers with "global-rms" or "lamp", and no signed scores with "lamp".
    assert len(cells) == len(settings["criteria"]) * len(settings["scopes"]) - 3
    assert {cell["num_elements"] for cell in cells} == {802_816}
    assert {cell["num_pruned"] for cell in cells} == {round(0.8 * 802_816)}
    assert results["num_mask_elements_compared"] >= len(cells) * 802_816
    assert results["num_mask_elements_differing"] == 0
    # No two criteria prune the same: each cell has a loss of its own.
    assert len({cell["loss_pruned"] for cell in cells}) == len(cells)
    table = (tmp_path / "results.md").read_text()
    assert all(f"| 80 %, {criterion} " in table for criterion in settings["criteria"])
    assert (tmp_path / "loss_by_criterion.png").exists()
