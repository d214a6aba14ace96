"""What is remembered of a pruning, for comparison with what is there later."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class MaskRecord:
    """The mask of one whole parameter, in a few words; the same on every rank and any sharding.

    Attributes:
        fingerprint: int64, as fingerprint.fingerprint_part adds it up over all shards.
        num_pruned: elements under the mask.
    """

    fingerprint: int
    num_pruned: int


@dataclass(frozen=True)
class CallRecord:
    """How a parameter's mask was chosen by its last pruning, as far as that can be repeated.

    Attributes:
        token: the same for all parameters of one call, in one process.
        position: of the parameter in the call's list ...
        num_parameters: ... of so many.
        num_pruned: elements that the call pruned, of all its parameters.
        sample: some of this rank's values then, by which a later change is noticed.
        obstacle: why it cannot be repeated; None if it can.
    """

    token: int
    position: int
    num_parameters: int
    num_pruned: int
    sample: Tensor | None
    obstacle: str | None


_tokens = itertools.count()


def new_token() -> int:
    """Tells one pruning call from all others of this process."""
    return next(_tokens)


class Member:
    """One of the parameters that were pruned together: their hooks know each other by it.

    A module that is put in the place of a pruned one has no trace of a mask; only those that were
    pruned with it can tell that one is missing.

    Args:
        label: the parameter's name.
        is_full: whether that is its full name in the model.
        module: has it; the first one if it is tied.

    Attributes:
        group: all members, this one included; shared by them.
    """

    def __init__(self, label: str, is_full: bool, module: nn.Module | None) -> None:
        self.label = label
        self.is_full = is_full
        self._module_ref = None if module is None else weakref.ref(module)
        self.group: set[Member] = {self}

    @property
    def is_gone(self) -> bool:
        """Whether the module is known to exist no more."""
        return self._module_ref is not None and self._module_ref() is None

    def forget(self) -> None:
        """The parameter is not to be pruned any more."""
        self.group.discard(self)

    def __getstate__(self) -> dict[str, Any]:
        # A copy stands for another module.
        return self.__dict__ | {"_module_ref": None}


def join(members: Iterable[Member], earlier: Iterable[Member | None]) -> None:
    """Let members know each other, and those whom the earlier ones, of the same hooks, knew."""
    joined, replaced = set(members), [old for old in earlier if old is not None]
    for old in replaced:
        old.forget()
    for group in {id(old.group): old.group for old in replaced}.values():
        joined |= group
    for member in joined:
        member.group = joined
