"""Records of a pruning, with which ``verify`` compares the model later."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class MaskRecord:
    """The mask of one whole parameter as two numbers; the same on every rank, on any sharding.

    Attributes:
        fingerprint: int64, as fingerprint.fingerprint_part adds it up over all shards.
        num_pruned: elements under the mask.
    """

    fingerprint: int
    num_pruned: int


@dataclass(frozen=True)
class CallRecord:
    """How the last pruning selected a parameter's mask, so that the selection can be repeated.

    Attributes:
        token: identifies the pruning call within this process.
        position: of the parameter in the call's list.
        num_parameters: length of that list.
        num_pruned: elements that the call pruned in all its parameters.
        sample: some of this rank's values at that time; shows whether the weights have changed.
        obstacle: why the selection cannot be repeated; None if it can.
    """

    token: int
    position: int
    num_parameters: int
    num_pruned: int
    sample: Tensor | None
    obstacle: str | None


_tokens = itertools.count()


def new_token() -> int:
    """A number that identifies one pruning call within this process."""
    return next(_tokens)


class Member:
    """One of the parameters that were pruned together; its hook refers to the others by it.

    A module that replaces a pruned one has no trace of a mask: that a parameter is missing shows
    only in those that were pruned together with it.

    Args:
        label: the parameter's name.
        is_full: whether the label is its full name in the model.
        module: the module that has it; the first one if the parameter is tied.

    Attributes:
        group: all members, this one included; one set, shared by all.
    """

    def __init__(self, label: str, is_full: bool, module: nn.Module | None) -> None:
        self.label = label
        self.is_full = is_full
        self._module_ref = None if module is None else weakref.ref(module)
        self.group: set[Member] = {self}

    @property
    def is_gone(self) -> bool:
        """Whether the module has been freed."""
        return self._module_ref is not None and self._module_ref() is None

    def forget(self) -> None:
        """Remove the parameter from its group: it need not be pruned any more."""
        self.group.discard(self)

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to another module.
        return self.__dict__ | {"_module_ref": None}


def join(members: Iterable[Member], earlier: Iterable[Member | None]) -> None:
    """Make one group of members, and of the groups of their hooks' previous members.

    Args:
        members: of one pruning call.
        earlier: the members that their hooks had before; each leaves its group.
    """
    joined, replaced = set(members), [old for old in earlier if old is not None]
    for old in replaced:
        old.forget()
    for group in {id(old.group): old.group for old in replaced}.values():
        joined |= group
    for member in joined:
        member.group = joined
