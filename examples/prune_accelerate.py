"""Prune under accelerate, whatever it wraps the model in: after `prepare`, on every process.

NPROC=8 CONFIG=fsdp2 launch/accelerate.sh examples/prune_accelerate.py     on GPUs
CPU=1 launch/accelerate.sh examples/prune_accelerate.py                    2 processes, DDP, no GPU
"""

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distprune as prune
from distprune import schedule
from distprune.integrations.accelerate import check_wrapping


class Block(nn.Module):
    _no_split_modules = ("Block",)  # what accelerate's FSDP wraps

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


def main() -> None:
    accelerator = Accelerator()
    torch.manual_seed(0)
    # Predict a byte of Python's own sources from the eight before it.
    windows = torch.tensor(list(Path(os.__file__).read_bytes())).unfold(0, 9, 1)
    loader = DataLoader(TensorDataset(windows), batch_size=256, shuffle=True, drop_last=True)
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), Block(256), Block(256), nn.Linear(256, 256)
    )
    model._no_split_modules = Block._no_split_modules
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # Accelerate may silently wrap the model in another way than configured; then this raises.
    num_processes = int(os.environ.get("NPROC", accelerator.num_processes))
    wrapping = check_wrapping(accelerator, model, num_processes=num_processes)
    accelerator.print(f"{accelerator.num_processes} processes, {wrapping}")

    pruner = schedule.ScheduledPruner(
        prune.select(model, types=nn.Linear),
        schedule.Cubic(begin=10, end=30, frequency=10, final_sparsity=0.8),
    )
    for _, (batch,) in zip(range(40), loader, strict=False):
        loss = nn.functional.cross_entropy(model(batch[:, :8]), batch[:, 8])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        report = pruner.step()
        if report is not None:
            accelerator.print(f"{report}\n")
    pruner.remove()  # an ordinary model again, with the zeros in its weights
    accelerator.print(f"done: loss {loss.item():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
