"""What becomes of elements whose mask has changed: their values, and their optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distprune._common.pruned_form import is_dtensor, local_tensor
from distprune.masks.hook import refresh_products
from distprune.shards.shard import LocalShard
from distprune.torch_private.managed import Managed


class Optimizer(Protocol):
    """A torch.optim.Optimizer, or a wrapper around one, as accelerate has it."""

    @property
    def state(self) -> Any: ...

    @property
    def param_groups(self) -> Any: ...


class ParameterState:
    """The state of one parameter.

    Args:
        optimizer: which has the parameter.
        shard: the parameter.
        managed: a wrapper's record of it, if it has one.

    Raises:
        ValueError: the optimizer does not have the parameter, and it is trained.
    """

    def __init__(self, optimizer: Optimizer, shard: LocalShard, managed: Managed | None) -> None:
        self._optimizer = optimizer
        self._tensor, self._span = (
            (shard.parameter, None) if managed is None else managed.optimizer_tensor
        )
        self._shard = shard
        known = any(p is self._tensor for g in optimizer.param_groups for p in g["params"])
        if not known and self._tensor.requires_grad:
            raise ValueError(
                f"{shard.name} is none of the optimizer's parameters; expected the optimizer that "
                "trains it, made after the model was wrapped."
            )

    @property
    def is_shared(self) -> bool:
        """Whether other parameters have the same state (FSDP1 without use_orig_params)."""
        return self._span is not None

    def tensors(self) -> list[Tensor]:
        """Views, N-d, of this rank's part of every tensor that has a value per element."""
        found = []
        for key, value in self._optimizer.state.get(self._tensor, {}).items():
            # A parameter of one element has the shape of the number of steps.
            if key == "step" or not isinstance(value, Tensor):
                continue
            if value.shape != self._tensor.shape or is_dtensor(value) != is_dtensor(self._tensor):
                continue
            local = local_tensor(value.detach())
            found.append(local if self._span is None else local[self._span])
        return [tensor for tensor in found if tensor.shape == self._shard.values.shape]

    def reset(self) -> None:
        """Forget everything: the next step begins as the first one does."""
        self._optimizer.state.pop(self._tensor, None)


@dataclass(frozen=True)
class Replaced:
    """The changes of one parameter on this rank, prepared before its mask is replaced.

    Attributes:
        places: every (module, name) of the parameter.
        values: this rank's part, N-d, a view of the unmasked parameter.
        zeroed: bool, like the values: the elements to set to zero; None: none.
        states: views of the optimizer's state, like the values.
        changed: bool, like the values: where the states are set to zero; None: nowhere.
        reset: the state to forget altogether; None: none.
    """

    places: Sequence[tuple[nn.Module, str]]
    values: Tensor
    zeroed: Tensor | None
    states: Sequence[Tensor]
    changed: Tensor | None
    reset: ParameterState | None

    def apply(self) -> None:
        """Make the changes, in place; nothing here can fail for want of memory."""
        with torch.no_grad():
            if self.zeroed is not None:
                self.values.masked_fill_(self.zeroed, 0)
            if self.changed is not None:
                for state in self.states:
                    state.masked_fill_(self.changed.to(state.device), 0)
        if self.reset is not None:
            self.reset.reset()

    def refresh(self) -> None:
        """Compute ``mask * weight_orig`` anew where a module keeps it."""
        refresh_products(self.places)
