"""A training run with a schedule, and what each rank holds of its parameters and masks."""

import torch
import torch.nn.functional as F
from torch import Tensor

import distprune as prune
from distprune import schedule
from distprune.base.naming import named_modules
from helpers import wrappings
from helpers.models import EVEN_HIDDEN, Net, fill

Part = dict[str, tuple[Tensor, Tensor]]


class Run:
    """A training run with a schedule, up to the step that it is asked for."""

    def __init__(self, wrapping: str, seed: int = 0, optimizer: type = torch.optim.AdamW):
        dense = fill(Net(EVEN_HIDDEN), "normal", "float32", seed)
        self.wrapping = wrapping
        self.indices = wrappings.local_indices(dense, wrapping)
        self.model = wrappings.wrap(dense, wrapping)
        options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
        parameters = self.model.parameters()
        self.optimizer = optimizer(parameters, lr=0.05, weight_decay=0.1, **options)
        ramp = schedule.Linear(1, 5, 2, final_sparsity=0.6, initial_sparsity=0.3)
        self.pruner = schedule.ScheduledPruner(prune.select(self.model), ramp)

    @property
    def everything(self) -> tuple:
        return self.model, self.optimizer, self.pruner

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.pruner.num_steps)
        x, y = torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)
        part, num_parts = wrappings.data_rank(self.wrapping)
        self.optimizer.zero_grad()
        out = self.model(x.chunk(num_parts)[part])
        F.mse_loss(out, y.chunk(num_parts)[part]).backward()
        self.optimizer.step()
        self.pruner.step()

    def parts(self) -> Part:
        """(masked values, indices) of what this rank holds of every parameter; and masks."""
        modules, parts = dict(named_modules(self.model)), {}
        for name, indices in self.indices.items():
            path, _, parameter = name.rpartition(".")
            mask = modules[path]._buffers.get(parameter + "_mask")
            held = wrappings.shard(self.model, name, self.indices).clone()
            if mask is not None:
                parts[name + "_mask"] = wrappings.local(mask).clone(), indices
                held *= wrappings.local(mask)
            parts[name] = held, indices
        return parts

    def compare(self, full: dict[str, Tensor], when: str, exact: bool) -> list[str]:
        parts, wrong = self.parts(), []
        if set(parts) != set(full):
            return [f"{when}: {sorted(parts)}, not {sorted(full)}"]
        for name, (held, indices) in parts.items():
            expected = wrappings.my_part(full[name], indices).to(held.dtype)
            tolerance = 0 if exact or name.endswith("_mask") else 1e-6
            if not torch.allclose(held, expected, rtol=0, atol=tolerance):
                wrong.append(f"{when}: {name} is off by {(held.float() - expected).abs().max()}")
        return wrong
