"""Checkpoints of the main job: a training under a schedule goes on elsewhere, with its masks."""

import sys
from pathlib import Path

import pytest
import torch
from shell import ROOT

import distprune as prune
from distprune.schedule import Linear, ScheduledPruner
from distprune.testing import run_ranks

sys.path.insert(0, str(ROOT / "launch"))


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


@pytest.mark.thorough
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
