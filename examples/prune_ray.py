"""Gradual pruning under Ray Train: the lines marked (prune) are all it takes.

pip install 'ray[train]' && python examples/prune_ray.py
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import distprune as prune  # (prune)
from distprune import schedule  # (prune)


def train(config: dict[str, Any]) -> None:
    """What each worker runs; Ray has made the process group."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    # Predict a byte of Python's own sources from the eight before it.
    text = torch.tensor(list(Path(os.__file__).read_bytes()))
    windows = text.unfold(0, 9, 1)
    model: nn.Module = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)
    )
    model = prepare_model(model)  # DDP; parallel_strategy="fsdp" and fully_shard do as well
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pruner = schedule.ScheduledPruner(  # (prune)
        prune.select(model, types=nn.Linear),
        schedule.Cubic(begin=10, end=40, frequency=10, final_sparsity=config["sparsity"]),
    )

    torch.manual_seed(rank)  # every worker draws its own batches
    for _ in range(60):
        batch = windows[torch.randint(len(windows), (256,))]
        loss = nn.functional.cross_entropy(model(batch[:, :8]), batch[:, 8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()  # (prune)
    prune.verify(model)  # (prune) on every worker; raises on all if a mask does not act
    pruner.remove()  # (prune) an ordinary model again, with the zeros in its weights
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            torch.save(model.module.state_dict(), Path(folder) / "model.pt")
        checkpoint = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
        ray.train.report({"loss": loss.item(), "sparsity": pruner.sparsity}, checkpoint=checkpoint)


def main() -> None:
    trainer = TorchTrainer(
        train,
        train_loop_config={"sparsity": 0.8},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
    )
    result = trainer.fit()
    print(f"done: {result.metrics} in {result.checkpoint}")


if __name__ == "__main__":
    main()
