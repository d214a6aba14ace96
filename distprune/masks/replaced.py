"""What becomes of elements whose mask has changed: their values, and the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distprune.masks.hook import find_hook
from distprune.masks.optimizer_state import ParameterState
from distprune.torch_private import live_property


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
        for module, name in self.places:
            present = find_hook(module, name)
            if present is not None and not live_property.is_live(module, name):
                setattr(module, name, present[1].apply_mask(module))
