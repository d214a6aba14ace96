"""Prune a model while it is adapted to another text: by movement, the weights that go towards zero.

launch/torchrun.sh examples/movement_pruning.py
launch/torchrun.sh examples/movement_pruning.py magnitude     the smallest weights, to compare
"""

import os
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distprune as prune
from distprune import criteria, schedule

STEPS, BATCH = 150, 512


def batch_of(step: int, windows: torch.Tensor) -> torch.Tensor:
    """This rank's part of a batch that only the step decides."""
    picks = torch.randint(len(windows), (BATCH,), generator=torch.Generator().manual_seed(step))
    return windows[picks.chunk(dist.get_world_size())[dist.get_rank()]]


def loss_on(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(windows[:, :8]), windows[:, 8])


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    # Predict a byte from the eight before it: first of Python's sources, then of its help texts.
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    source = torch.tensor(list(b"".join(file.read_bytes() for file in files))).unfold(0, 9, 1)
    text = torch.tensor(list("".join(topics.values()).encode()))
    train, held_out = text[:-40_000].unfold(0, 9, 1), text[-40_000:].unfold(0, 9, 5)
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)
    )
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        loss_on(model, batch_of(step, source)).backward()
        optimizer.step()
        optimizer.zero_grad()

    targets = prune.select(model, types=nn.Linear)
    plan = schedule.Cubic(begin=20, end=100, frequency=20, final_sparsity=0.95)
    movement = criteria.Movement(targets)
    if "magnitude" in sys.argv:
        pruner = schedule.ScheduledPruner(targets, plan, normalize="rms")
    else:
        # Scores have a sign, so the lowest are pruned. They are asked for when a pruning is due.
        pruner = schedule.ScheduledPruner(
            targets, plan, pruning_method=prune.LowestScore, importance_scores=movement.scores
        )
    for step in range(STEPS):
        # Let pruned weights have gradients, too, until the context ends: so all scores are made in
        # the same way, as in the paper. (Here a weight that is pruned stays pruned.)
        with prune.dense_gradients(model):
            loss_on(model, batch_of(step, train)).backward()
            movement.update()  # minus gradient times weight, with the weights of this backward
        optimizer.step()
        optimizer.zero_grad()
        report = pruner.step()
        if report is not None and dist.get_rank() == 0:
            print(f"step {step}\n{report}\n")
    pruner.remove()  # an ordinary model again, with the zeros in its weights

    with torch.no_grad():
        loss = loss_on(model, held_out).item()
    if dist.get_rank() == 0:
        print(f"held-out loss: {loss:.3f} nats per byte")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
