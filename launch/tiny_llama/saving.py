"""Save the pruned model for plain transformers, and check what a fresh process gets from it."""

from __future__ import annotations

import json
import math
from pathlib import Path

from torch import nn
from transformers.utils.logging import disable_progress_bar

import distprune as prune
from jobs.processes import Job, run_alone

from .model import build_model, consolidated_state


def save_model(model: nn.Module, folder: Path, job: Job) -> None:
    """Write a model without masks with `save_pretrained`. Collective; rank 0 writes."""
    state = consolidated_state(model)
    if job.rank == 0:
        plain = build_model()
        plain.load_state_dict(state)
        disable_progress_bar()  # of one file that is written at once
        plain.save_pretrained(folder)


def count_kept_zeros(model: nn.Module) -> dict[str, int]:
    """Per parameter with a mask, the elements that are zero although their mask keeps them.

    Training can leave a weight at exactly 0.0. Such a zero is no work of the pruning, but
    whoever counts zeros in the saved file will count it. Collective; empty but on rank 0.
    """
    state = consolidated_state(model)
    masks = {
        key.removesuffix("_mask"): value.bool()
        for key, value in state.items()
        if key.endswith("_mask")
    }
    return {name: int(((state[f"{name}_orig"] == 0) & keep).sum()) for name, keep in masks.items()}


def find_faults(
    folder: Path,
    report: prune.PruningReport,
    loss: float,
    num_kept_zeros: dict[str, int],
    num_held_out_windows: int,
) -> list[str]:
    """Load the saved model in a fresh process with plain transformers; say what is not as promised.

    Args:
        folder: written by `save_model`.
        report: of the last pruning.
        loss: held-out nats/byte measured on the wrapped model just before saving.
        num_kept_zeros: per parameter, elements that no mask pruned and that are zero anyway.
        num_held_out_windows: on which the loss was measured.

    Returns:
        One sentence per fault; empty if every parameter has exactly the promised zeros.
    """
    findings_file = folder.parent / "saved_model.json"
    arguments = map(str, (folder, findings_file, num_held_out_windows))
    run_alone("tiny_llama.saved_model", *arguments)
    findings = json.loads(findings_file.read_text())

    faults = []
    for entry in report.parameters:
        num_zeros, expected = (
            findings["num_zeros"][entry.name],
            entry.num_pruned + num_kept_zeros[entry.name],
        )
        if num_zeros != expected:
            faults.append(f"{entry.name} was loaded with {num_zeros} zeros, expected {expected}")
    if not math.isclose(findings["held_out_loss"], loss, rel_tol=1e-5):
        faults.append(
            f"the loaded model's held-out loss is {findings['held_out_loss']}, expected {loss}"
        )
    return faults
