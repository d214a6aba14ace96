"""Find a lottery ticket: train, prune, rewind what is left to its early values, and again.

python examples/lottery_ticket.py                  one process, CPU or GPU
launch/torchrun.sh examples/lottery_ticket.py      the same tickets, sharded by FSDP2
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distprune as prune

REWIND_STEP = 10  # early, but not the very start: Frankle et al., 2020
ROUNDS, STEPS, BATCH = 3, 60, 512


def train(model: nn.Module, windows: torch.Tensor, first: int) -> tuple[float, dict]:
    """Train from step `first` on; return the last loss and the parameters at REWIND_STEP."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    early = {}
    for step in range(first, STEPS):
        if step == REWIND_STEP:
            early = {name: p.detach().clone() for name, p in model.named_parameters()}
        picks = torch.randint(len(windows), (BATCH,), generator=torch.Generator().manual_seed(step))
        batch = windows[picks.chunk(size)[rank]]
        loss = nn.functional.cross_entropy(model(batch[:, :8]), batch[:, 8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), early


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    torch.manual_seed(0)
    # Predict a byte of Python's own sources from the eight before it.
    windows = torch.tensor(list(Path(os.__file__).read_bytes())).unfold(0, 9, 1)
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)
    )
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    targets = prune.select(model, types=nn.Linear)
    loss, early = train(model, windows, first=0)
    for _ in range(ROUNDS):
        if is_first:
            print(f"loss {loss:.3f}")
        # Prune half of the remaining weights; keep the masks and rewind the remaining weights.
        report = prune.global_unstructured(targets, prune.L1Unstructured, amount=0.5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(early[name.removesuffix("_orig")])
        if is_first:
            print(f"ticket: {report.num_elements - report.num_pruned:,} weights left", end=", ")
        loss, _ = train(model, windows, first=REWIND_STEP)
    if is_first:
        print(f"loss {loss:.3f}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
