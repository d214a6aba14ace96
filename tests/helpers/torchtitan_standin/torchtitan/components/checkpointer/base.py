"""The wrapper that flattens a model for checkpoints, and remembers the tensors that it had."""

from typing import Any

from torch import nn

MODEL = "model"


class ModelWrapper:
    def __init__(self, model: nn.Module | list[nn.Module]) -> None:
        self.model = [model] if isinstance(model, nn.Module) else model
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
