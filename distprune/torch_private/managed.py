"""A wrapper's record of a parameter, and a mask at work on it: what the adapters have in common.

FSDP1 and FSDP2 take parameters away from their modules: what is registered there changes
between shard and gathered copy. Their adapters describe each such parameter as a
:class:`Managed`; everything else in the library works on that description.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from distprune._common.pruned_form import name_without_orig

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor


def backward_to_come(module: nn.Module, name: str) -> RuntimeError:
    """A mask would change between a forward and its backward."""
    name = name_without_orig(name)
    return RuntimeError(
        f"{type(module).__name__}.{name} was used by a forward whose backward is still to come. "
        "FSDP gathers parameters again for backward, so that gradients would mix the weights "
        "before and after this call; expected a call before the forward, or after its backward. "
        "If no backward is to come, delete what the forward returned (loss, outputs) first, or run "
        "it under torch.no_grad()."
    )


class Managed(ABC):
    """One parameter that a wrapper shards and gathers."""

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """The same for every name of a tied parameter."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Shape of the whole parameter."""

    @property
    @abstractmethod
    def owners(self) -> list[tuple[nn.Module, str]]:
        """Every (module, name) under which the wrapper registers the parameter."""

    @property
    @abstractmethod
    def unsupported(self) -> str | None:
        """Why a mask cannot act on this parameter; None if it can."""

    @property
    @abstractmethod
    def persists_mask(self) -> bool:
        """Whether the mask is an ordinary buffer of the state dict.

        If not, the wrapper's :class:`ShardMask` puts it there.
        """

    @abstractmethod
    def check_fields(self) -> None:
        """Raise NotImplementedError naming the private fields that this torch lacks."""

    @abstractmethod
    def is_in_graph(self) -> bool:
        """Whether a backward is still to come that may need the gathered copy."""

    @abstractmethod
    def free_gathered(self) -> None:
        """Free the gathered copy, if there is one, even if a backward is still to come."""

    def reshard(self) -> None:
        """Free the gathered copy, if there is one: it was made without the mask to come.

        Raises:
            RuntimeError: a backward is still to come that needs the copy.
        """
        self.check_no_backward()
        self.free_gathered()

    def check_no_backward(self) -> None:
        """Raise RuntimeError if a backward is still to come that may need the gathered copy."""
        if self.is_in_graph():
            raise backward_to_come(*self.owners[0])

    @abstractmethod
    def has_registered(self, module: nn.Module, name: str) -> bool:
        """Whether a module has this parameter under a name, or a copy or view that FSDP made."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Make the wrapper register as ``new`` what it registers as ``old``.

        The caller renames the parameter in the modules themselves.
        """

    @property
    @abstractmethod
    def gathers_in_other_dtype(self) -> bool:
        """Whether forwards use a copy in another dtype than the shard's (mixed precision)."""

    @property
    @abstractmethod
    def optimizer_tensor(self) -> tuple[Tensor, slice | None]:
        """The tensor registered with the optimizer, and this parameter's slice of it (None: all).

        The optimizer's state has tensors of the same form.
        """

    @property
    @abstractmethod
    def requires_grad(self) -> bool:
        """Whether a backward gives the parameter a gradient."""

    @property
    @abstractmethod
    def gradient(self) -> Tensor | None:
        """This rank's part of ``.grad``, a local tensor laid out like the shard, or None.

        What the last synchronised backward left; not what waits for its reduction.
        """

    @abstractmethod
    def drop_gradient(self) -> None:
        """Set ``.grad`` to None, and what else the wrapper keeps together with it."""

    @property
    @abstractmethod
    def has_unreduced_gradient(self) -> bool:
        """Whether gradients of backward passes without synchronisation wait for their reduction."""

    @abstractmethod
    def write(self, values: Tensor) -> None:
        """Overwrite this rank's shard.

        Raises:
            RuntimeError: a backward is still to come that needs the present values.
        """


class ManagedDTensor(Managed):
    """A parameter that is sharded as a DTensor (FSDP2)."""

    @property
    @abstractmethod
    def sharded(self) -> DTensor:
        """The sharded parameter, whatever is registered on the module at the moment."""

    @property
    @abstractmethod
    def plain_replacement(self) -> Tensor | None:
        """The plain tensor that ``load_state_dict(assign=True)`` put in place of the DTensor."""


class ManagedRun(Managed):
    """A parameter of which each rank has a run of elements, in the order of memory (FSDP1).

    Attributes:
        wrapper: the module that shards the parameter; all its parameters have the same ranks.
    """

    wrapper: nn.Module

    @property
    @abstractmethod
    def stride(self) -> tuple[int, ...]:
        """Stride of the whole parameter: runs follow its memory."""

    @property
    @abstractmethod
    def start(self) -> int:
        """Where this rank's run begins in the memory of the whole parameter."""

    @property
    @abstractmethod
    def span(self) -> tuple[int, int]:
        """(offset, size) of this rank's run in what it has of all parameters of the wrapper."""

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """This rank's run, 1-d, a view of the unmasked shard."""

    @property
    @abstractmethod
    def groups(self) -> list[dist.ProcessGroup]:
        """Process groups of the ranks that have the parameter: shards, then replicas."""

    @property
    @abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that have the parameter."""

    @property
    @abstractmethod
    def replica(self) -> tuple[int, int]:
        """Which copy of its elements this rank has, and how many copies there are."""

    @property
    @abstractmethod
    def layout(self) -> str:
        """How the parameter is sharded, for messages and for comparing ranks."""


class ShardMask(ABC):
    """The mask of one managed parameter at work."""

    @abstractmethod
    def attach(self) -> None:
        """Let the next all-gather, and the gradient, see the mask."""

    @abstractmethod
    def detach(self) -> None:
        """Undo :meth:`attach`."""

    @abstractmethod
    def is_attached(self) -> bool:
        """Whether the mask still acts."""

    @abstractmethod
    def value(self, module: nn.Module, name: str) -> Tensor:
        """``module.<name>`` as the mask leaves it, in whatever state the wrapper has it."""

    @abstractmethod
    def managed(self) -> Managed | None:
        """The wrapper's record of the parameter; None if the wrapper is gone."""
