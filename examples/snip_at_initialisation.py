"""Prune 90 % of a model before it is trained: by SNIP, and at random for comparison.

python examples/snip_at_initialisation.py                  one process
launch/torchrun.sh examples/snip_at_initialisation.py      sharded by FSDP2
"""

import os
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distprune as prune
from distprune import criteria

STEPS, BATCH, SNIP_BATCHES = 200, 512, 8


def build_model() -> nn.Module:
    torch.manual_seed(0)  # the same first weights on every rank, every time
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)
    )
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def loss_on(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(windows[:, :8]), windows[:, 8])


def batch_of(step: int, windows: torch.Tensor) -> torch.Tensor:
    """This rank's part of a batch that only the step decides."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    picks = torch.randint(len(windows), (BATCH,), generator=torch.Generator().manual_seed(step))
    return windows[picks.chunk(size)[rank]]


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    # Predict a byte of Python's own help texts from the eight before it.
    text = torch.tensor(list("".join(topics.values()).encode()))
    train, held_out = text[:-40_000].unfold(0, 9, 1), text[-40_000:].unfold(0, 9, 5)
    for name in ("dense", "snip", "random"):
        model = build_model()
        targets = prune.select(model, types=nn.Linear)
        if name == "snip":
            # |weight * gradient|, of the sum of the gradients of some batches. It needs nothing but
            # the averaged gradients, of which each rank has its part under FSDP2.
            snip = criteria.SNIP(targets)
            for step in range(SNIP_BATCHES):
                loss_on(model, batch_of(STEPS + step, train)).backward()
                snip.update()
                model.zero_grad()
            prune.global_unstructured(targets, snip.pruning_method, snip.scores(), amount=0.9)
        elif name == "random":
            prune.global_unstructured(targets, prune.RandomUnstructured, amount=0.9)

        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(STEPS):
            loss_on(model, batch_of(step, train)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss = loss_on(model, held_out).item()
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"{name}: held-out loss {loss:.3f} nats per byte")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
