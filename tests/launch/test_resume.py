"""The main job under a schedule: killed and restarted, it ends with the same result."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from shell import ROOT, kill_when, run, start

import distprune as prune
from distprune.schedule import Linear, ScheduledPruner
from distprune.testing import run_ranks

sys.path.insert(0, str(ROOT / "launch"))

ARGUMENTS = ["--schedule", "cubic", "--steps", 4, "--finetune-steps", 1, "--checkpoint-every", 1]
ARGUMENTS += ["--held-out-windows", 20]
SCRIPT = "launch/prune_tiny_llama.sh"


@pytest.mark.slow
@pytest.mark.thorough
def test_killed_and_started_again(tmp_path):
    # Not disturbed until the training with which the other one is compared is over.
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    job = start(SCRIPT, *ARGUMENTS, "--output", undisturbed)
    kill_when(undisturbed / "checkpoints/magnitude/step-000005", job)

    # Prunings are due after steps 3 and 4.
    job = start(SCRIPT, *ARGUMENTS, "--output", killed)
    kill_when(killed / "checkpoints/magnitude/step-000003", job)
    assert not (killed / "checkpoints/magnitude/step-000005").exists()
    status, output = run(SCRIPT, *ARGUMENTS, "--output", killed)
    assert status == 0, output
    assert "magnitude: continuing after step" in output
    assert "random: continuing" not in output

    for name in ("masks_2", "before_3", "masks_3"):
        file = f"single_process/magnitude_{name}.safetensors"
        one, other = load_file(undisturbed / file), load_file(killed / file)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), name
    results = json.loads((killed / "results.json").read_text())
    assert [found["num_differing"] for found in results["mask_comparisons"]] == [0] * 4
    assert results["saved_model_faults"] == []
    assert not (killed / "checkpoints").exists()


def train_and_save(folder: str, wrap: str, steps: range) -> dict[str, torch.Tensor]:
    """Continue a training for some steps and save it; its state then, whole, on rank 0."""
    from jobs.checkpoints import Checkpoints
    from jobs.processes import Job
    from tiny_llama.model import build_model, consolidated_state, wrap_model
    from tiny_llama.training import make_optimizer

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    job = Job(rank, size, torch.device("cpu"), 0.0)
    torch.manual_seed(len(steps))  # weights that a checkpoint has to replace
    model = wrap_model(build_model(), wrap, job.device, size)
    optimizer = make_optimizer(model, 1e-2)
    pruner = ScheduledPruner(prune.select(model), Linear(0, 9, 3, 0.9, 0.3))
    checkpoints = Checkpoints(Path(folder), {"seed": 0}, job)
    first, events = checkpoints.load(model, optimizer, pruner)
    assert (first, len(events)) == (steps.start, steps.start)
    assert pruner.num_steps == first
    before = {key: value.clone() for key, value in consolidated_state(model).items()}
    for step in steps:
        model(input_ids=torch.arange(8)[None] + step, labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()
        events.append({"step": step})
    if steps:
        checkpoints.save(steps.stop, model, optimizer, pruner, events)
    return {"before": before, "after": consolidated_state(model)}


def test_a_checkpoint_continues_on_other_ranks_and_wrappings(tmp_path):
    saved = run_ranks(train_and_save, 2, str(tmp_path), "fsdp2", range(2))[0]["after"]
    assert sum("weight_mask" in key for key in saved) > 20
    (tmp_path / "partial-000099").mkdir()  # what a run leaves that was killed while saving
    for world_size, wrap, steps in ((3, "fsdp2", 0), (2, "tp", 0), (1, "ddp", 2)):
        then = range(2, 2 + steps)
        found = run_ranks(train_and_save, world_size, str(tmp_path), wrap, then)[0]["before"]
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[key].to(saved[key]), saved[key]) for key in saved), wrap
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]

    progress = tmp_path / "step-000004/progress.json"
    progress.write_text(progress.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(AssertionError, match=r"written with \{'seed': 1\}, and this run has"):
        run_ranks(train_and_save, 2, str(tmp_path), "fsdp2", range(4, 4))
