"""Gradual pruning in a run of torchtitan 0.3; the folder of this file is on PYTHONPATH:

torchrun --nproc-per-node 8 -m torchtitan.train --module prune_torchtitan --config pruned_llama3
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import MODEL, ModelWrapper
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

import distprune as prune  # (prune)
from distprune import schedule  # (prune)


class PruningTrainer(Trainer):
    """Follows a schedule. The last checkpoint is of an ordinary model with zeros in it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        sparsity: float = 0.5
        prune_every: int = 100
        """Steps from a pruning to the next; the last one is halfway through."""

    config: Config
    checkpointer: CheckpointManager

    def __init__(self, config: Config) -> None:
        if not config.training.disable_cuda_graphs:
            raise ValueError("a captured graph has no masks: set --training.disable_cuda_graphs")
        super().__init__(config)
        every, steps = config.prune_every, config.training.steps
        self.pruner = schedule.ScheduledPruner(  # (prune)
            [pair for part in self.model_parts for pair in prune.select(part)],
            schedule.Cubic(0, max(every, steps // 2 // every * every), every, config.sparsity),
            pipeline_parallel=self.parallel_dims.pp_enabled,
        )
        # Checkpoints of this run have masks, from the first step on; any other has none.
        folder = Path(self.checkpointer.folder) if config.checkpoint.enable else None
        self.resumes = folder is not None and any(folder.glob("step-*"))
        if self.resumes:
            self.add_masks()

    def add_masks(self) -> None:
        for module, name in self.pruner.parameters:  # (prune) they prune nothing yet
            prune.identity(module, name)
        self.rename_in_checkpoints()

    def rename_in_checkpoints(self) -> None:  # torchtitan saves by the names of the beginning
        if self.config.checkpoint.enable:
            self.checkpointer.states[MODEL] = ModelWrapper(self.model_parts)

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        pairs = self.pruner.parameters
        if not prune.is_pruned(pairs[0][0]):
            self.add_masks()
        elif self.resumes:
            prune.set_masks(pairs, prune.get_masks(pairs))  # (prune) as loaded, for verify
            self.resumes = False
        super().train_step(data_iterator)
        self.pruner.step()  # (prune)
        if self.step == self.config.training.steps:
            for part in self.model_parts:  # (prune) raises on all ranks if a mask does not act
                prune.verify(part, pipeline_parallel=self.parallel_dims.pp_enabled)  # (prune)
            self.pruner.remove()  # (prune)
            self.rename_in_checkpoints()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.pruner.num_steps = self.step  # (prune)


def pruned_llama3() -> PruningTrainer.Config:
    base = llama3_debugmodel()
    options = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    return PruningTrainer.Config(**options)
