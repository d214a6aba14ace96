"""Gradual pruning in a plain training loop under FSDP2: the lines marked (prune) are all it takes.

launch/torchrun.sh examples/prune_fsdp2.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distprune as prune  # (prune)
from distprune import schedule  # (prune)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    # Predict a byte of Python's own sources from the eight before it.
    text = torch.tensor(list(Path(os.__file__).read_bytes()))
    windows = text.unfold(0, 9, 1)
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)
    )
    for layer in (model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pruner = schedule.ScheduledPruner(  # (prune)
        prune.select(model, types=nn.Linear),
        schedule.Cubic(begin=10, end=40, frequency=10, final_sparsity=0.8),
    )

    torch.manual_seed(dist.get_rank())  # every rank draws its own batches
    for step in range(60):
        batch = windows[torch.randint(len(windows), (256,))]
        loss = nn.functional.cross_entropy(model(batch[:, :8]), batch[:, 8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report = pruner.step()  # (prune) None where nothing is due
        if report is not None and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}\n{report}\n")
    pruner.remove()  # (prune) an ordinary model again, with the zeros in its weights
    if dist.get_rank() == 0:
        print(f"done: loss {loss.item():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
