"""A stand-in for what examples/prune_torchtitan.py uses of torchtitan 0.3.0, on a small model.

torchtitan itself needs torch 2.15, and packages that the tests do not install. Here are the same
names, types and order of calls.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.fsdp import fully_shard

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODEL = "model"


class ModelWrapper:
    """Flattens a model for checkpoints, and remembers the tensors that it had."""

    def __init__(self, model: list[nn.Module]) -> None:
        self.model = model
        self.cached_state_dict = self._get_state_dict()

    def _get_state_dict(self) -> dict[str, Any]:
        return {k: v for model in self.model for k, v in model.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        for key, value in self._get_state_dict().items():
            cached = self.cached_state_dict.get(key)
            if cached is None or cached.shape != value.shape or cached.dtype != value.dtype:
                self.cached_state_dict[key] = value
            else:
                cached.copy_(value)
        return self.cached_state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for model in self.model:
            model.load_state_dict(state_dict, strict=False)
        self.cached_state_dict = self._get_state_dict()


class CheckpointManager:
    def __init__(self, folder: str, model_parts: list[nn.Module], trainer: Any) -> None:
        self.folder, self.states = folder, {MODEL: ModelWrapper(model_parts), "trainer": trainer}

    def _flat(self) -> dict[str, Any]:
        return self.states[MODEL].state_dict() | {"trainer": self.states["trainer"].state_dict()}

    def load(self) -> None:
        steps = [int(path.name[5:]) for path in Path(self.folder).glob("step-*")]
        if steps:
            states = self._flat()
            state_dict_loader.load(states, checkpoint_id=f"{self.folder}/step-{max(steps)}")
            self.states[MODEL].load_state_dict(states)
            self.states["trainer"].load_state_dict(states["trainer"])

    def save(self, curr_step: int, last_step: bool = False) -> None:
        states = self.states[MODEL].state_dict() if last_step else self._flat()
        state_dict_saver.save(states, checkpoint_id=f"{self.folder}/step-{curr_step}")


class Trainer:
    """torchtitan's loop and checkpoints, of a model that FSDP2 shards."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        dump_folder: str = "./outputs"
        training: Any = field(
            default_factory=lambda: SimpleNamespace(steps=10, disable_cuda_graphs=False)
        )
        checkpoint: Any = field(default_factory=lambda: SimpleNamespace(enable=False, interval=4))

    def __init__(self, config: Config) -> None:
        self.config, self.step = config, 0
        self.parallel_dims = SimpleNamespace(pp_enabled=False)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        self.model_parts = [model]
        self.optimizers = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        folder = f"{config.dump_folder}/checkpoint"
        self.checkpointer = CheckpointManager(folder, self.model_parts, self)

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        self.optimizers.zero_grad()
        self.model_parts[0](next(data_iterator)).square().mean().backward()
        self.optimizers.step()

    def train(self) -> None:
        checkpoint, steps = self.config.checkpoint, self.config.training.steps
        if checkpoint.enable:
            self.checkpointer.load()
        while self.step < steps:
            generator = torch.Generator().manual_seed(100 * self.step + dist.get_rank())
            self.step += 1
            self.train_step(iter([torch.randn(4, 6, generator=generator)]))
            if checkpoint.enable and (self.step % checkpoint.interval == 0 or self.step == steps):
                self.checkpointer.save(self.step, last_step=self.step == steps)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


@contextlib.contextmanager
def example() -> Iterator[Any]:
    """The example, imported with the stand-in; both are forgotten afterwards."""
    checkpointer, base = "torchtitan.components.checkpointer", {"MODEL": MODEL}
    modules = {
        checkpointer: {"CheckpointManager": CheckpointManager},
        f"{checkpointer}.base": base | {"ModelWrapper": ModelWrapper},
        "torchtitan.models.llama3.config_registry": {"llama3_debugmodel": Trainer.Config},
        "torchtitan.trainer": {"Trainer": Trainer},
    }
    modules = {name: SimpleNamespace(**names) for name, names in modules.items()}
    with mock.patch.dict(sys.modules, modules), mock.patch.object(sys, "path", [*sys.path]):
        sys.path.insert(0, str(EXAMPLES))
        yield importlib.import_module("prune_torchtitan")
