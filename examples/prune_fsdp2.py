"""Add pruning to a plain training loop under FSDP2: the lines marked (prune) are all it takes.

torchrun --standalone --nproc-per-node 2 examples/prune_fsdp2.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distprune as prune  # (prune)


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

    torch.manual_seed(dist.get_rank())  # every rank draws batches of its own
    targets = prune.select(model, types=nn.Linear)  # (prune)
    for step in range(60):
        if step == 30:
            report = prune.global_unstructured(targets, prune.L1Unstructured, amount=0.8)  # (prune)
            if dist.get_rank() == 0:
                print(report)
        batch = windows[torch.randint(len(windows), (256,))]
        loss = nn.functional.cross_entropy(model(batch[:, :8]), batch[:, 8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    for module, name in targets:
        prune.remove(module, name)  # (prune)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
