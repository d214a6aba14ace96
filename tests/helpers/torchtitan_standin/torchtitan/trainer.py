"""The trainer: a small model, sharded by FSDP2, with torchtitan's loop and checkpoints."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager


@dataclass
class TrainingConfig:
    steps: int = 10
    disable_cuda_graphs: bool = False


@dataclass
class CheckpointConfig:
    enable: bool = False
    interval: int = 500


@dataclass
class ParallelDims:
    pp_enabled: bool = False


class Trainer:
    @dataclass(kw_only=True, slots=True)
    class Config:
        dump_folder: str = "./outputs"
        training: TrainingConfig = field(default_factory=TrainingConfig)
        checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    config: Config
    parallel_dims: ParallelDims
    model_parts: list[nn.Module]
    optimizers: torch.optim.Optimizer
    checkpointer: BaseCheckpointManager
    step: int

    def __init__(self, config: Config) -> None:
        self.config, self.parallel_dims, self.step = config, ParallelDims(), 0
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        self.model_parts = [model]
        self.optimizers = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        self.checkpointer = CheckpointManager(
            f"{config.dump_folder}/checkpoint", self.model_parts, {"train_state": self}
        )

    def batch_generator(self) -> Iterator[Any]:
        while True:
            generator = torch.Generator().manual_seed(100 * self.step + dist.get_rank())
            yield torch.randn(4, 6, generator=generator)

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        self.optimizers.zero_grad()
        self.model_parts[0](next(data_iterator)).square().mean().backward()
        self.optimizers.step()

    def train(self) -> None:
        checkpoint, steps = self.config.checkpoint, self.config.training.steps
        if checkpoint.enable:
            self.checkpointer.load()
        data_iterator = self.batch_generator()
        while self.step < steps:
            self.step += 1
            self.train_step(data_iterator)
            if checkpoint.enable and (self.step % checkpoint.interval == 0 or self.step == steps):
                self.checkpointer.save(self.step, last_step=self.step == steps)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
