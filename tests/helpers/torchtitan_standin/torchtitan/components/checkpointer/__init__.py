"""The manager of checkpoints; there are others, which have less in common."""

from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from torchtitan.components.checkpointer.base import MODEL, ModelWrapper


class BaseCheckpointManager:
    def load(self) -> None: ...

    def save(self, curr_step: int, last_step: bool = False) -> None: ...


class CheckpointManager(BaseCheckpointManager):
    folder: str
    states: dict[str, Any]

    def __init__(self, folder: str, model_parts: list[nn.Module], states: dict[str, Any]) -> None:
        self.folder, self.states = folder, {MODEL: ModelWrapper(model_parts), **states}

    def _flat(self) -> dict[str, Any]:
        states = {k: v for k, v in self.states.items() if k != MODEL}
        model: dict[str, Any] = self.states[MODEL].state_dict()
        return model | {k: v.state_dict() for k, v in states.items()}

    def load(self) -> None:
        steps = [int(path.name[5:]) for path in Path(self.folder).glob("step-*")]
        if not steps:
            return
        states = self._flat()
        state_dict_loader.load(states, checkpoint_id=f"{self.folder}/step-{max(steps)}")
        self.states[MODEL].load_state_dict(states)
        for name in self.states.keys() - {MODEL}:
            self.states[name].load_state_dict(states[name])

    def save(self, curr_step: int, last_step: bool = False) -> None:
        states = self.states[MODEL].state_dict() if last_step else self._flat()
        state_dict_saver.save(states, checkpoint_id=f"{self.folder}/step-{curr_step}")
