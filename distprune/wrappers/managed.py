"""A wrapper's record of a parameter, and where its gradients are: what the adapters have in common.

FSDP1 and FSDP2 take parameters away from their modules: what is registered there changes
between shard and gathered copy. Their adapters describe each such parameter as a
:class:`Managed`; everything else in the library works on that description.

[Note: hooks on leaves] Autograd calls a hook of a leaf (``Tensor.register_hook``) once per
backward, with the gradient that it is about to accumulate. At that moment nothing is added to it
from earlier backward passes, no wrapper has averaged, scaled, cast or masked it, and it does not
matter whether the wrapper synchronises after this backward (``no_sync``):

    wrapper                   the leaf                       its gradient
    none, DDP, TP             the parameter                  this rank's part of the parameter
    FSDP2, HSDP, FSDP2+TP     the gathered parameter         whole (TP: this rank's part)
    FSDP1                     the gathered flat parameter    all parameters of the flat one, whole

Under FSDP no rank may keep sums of whole parameters. What is computed from a gradient is cut into
the pieces that the ranks have of the parameter, and each rank gets the sum of its piece (by one
reduce-scatter, which the caller does).

From torch 2.15 on, FSDP2 tells autograd to round gradients to a ``reduce_dtype`` before any hook.

A communication hook would see less. DDP's, and FSDP2's ``set_custom_reduce_scatter``, get the sum
over the backward passes since the last synchronisation. FSDP2's is rounded to ``reduce_dtype``, may
be scaled, and is not called on one rank. FSDP1 refuses a hook after the first forward, and under
HYBRID_SHARD.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from distprune.base.pruned_form import is_dtensor
from distprune.ranks.collectives import resolved

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class HoldsZeros(Protocol):
    """What a wrapper needs of ``held.Held``."""

    record: Any

    @property
    def mask(self) -> Tensor:
        """This rank's part of the mask."""

    @property
    def has_dense_gradient(self) -> bool:
        """Whether the gradient is not to be masked for now."""

    def zero(self) -> None:
        """Write +0 wherever the mask is 0."""


class Managed(ABC):
    """One parameter that a wrapper shards and gathers.

    Attributes:
        persists_mask: whether the mask is an ordinary buffer of the state dict; if not,
            :class:`~distprune.wrappers.run_masks.MaskInStateDict` puts it there.
    """

    persists_mask: ClassVar[bool]

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

    @abstractmethod
    def check_fields(self) -> None:
        """Raise NotImplementedError naming the private fields that this torch lacks."""

    @abstractmethod
    def free_gathered(self) -> None:
        """Free the gathered copy, if there is one."""

    @abstractmethod
    def has_registered(self, module: nn.Module, name: str) -> bool:
        """Whether a module has this parameter under a name, or a copy or view that FSDP made."""

    @property
    @abstractmethod
    def stored(self) -> Sequence[Tensor]:
        """This rank's shard and all other copies that it keeps of it, each laid out like the mask.

        They are zero where the parameter is pruned: see ``wrappers.held``.
        """

    def hold(self, held: HoldsZeros) -> None:  # noqa: B027
        """Let zeros, and the gradient, be held where only the wrapper knows when."""

    def release(self, held: HoldsZeros) -> None:  # noqa: B027
        """Undo :meth:`hold`."""

    @property
    @abstractmethod
    def optimizer_tensor(self) -> tuple[Tensor, slice | None]:
        """The tensor registered with the optimizer, and this parameter's slice of it (None: all).

        The optimizer's state has tensors of the same form.
        """

    @abstractmethod
    def gradient_source(self) -> GradientSource:
        """Where the un-averaged gradients of the parameter are seen."""

    def of_leaf(self, gradient: Tensor) -> Tensor:
        """The gradient of this parameter in what its ``gradient_source`` receives: a view."""
        return gradient

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
        """Overwrite this rank's shard."""


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

    @property
    def stored(self) -> Sequence[Tensor]:
        return [self.sharded._local_tensor]


class ManagedRun(Managed):
    """A parameter of which each rank has a run of elements, in the order of memory."""

    persists_mask = False  # a run says nothing without its place; hooks put masks into state dicts

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
    def values(self) -> Tensor:
        """This rank's run, 1-d, a view of what it stores."""

    @property
    def stored(self) -> Sequence[Tensor]:
        return [self.values]

    # The mask in state dicts: this rank's run, unless the wrapper has another form.

    def mask_in_state_dict(self, run: Tensor) -> Any:
        """What a state dict gets of a mask, given this rank's run; None: nothing, on this rank."""
        return run

    def run_in_state_dict(self, saved: Any) -> Tensor:
        """This rank's run of what :meth:`mask_in_state_dict` returned.

        Raises:
            ValueError: of another form; says what was expected.
        """
        size = self.values.numel()
        if saved.numel() == self.shape.numel() and saved.shape != (size,):
            saved = saved.reshape(-1)[self.start : self.start + size]
        if saved.shape != (size,):
            raise ValueError(
                f"{(size,)}, the run of this rank, as a model that is sharded in the same way "
                f"saves it, or the whole mask, {tuple(self.shape)}"
            )
        run: Tensor = saved
        return run

    @property
    @abstractmethod
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """Process groups of the ranks that have the parameter: shards, then replicas."""

    @property
    @abstractmethod
    def runs(self) -> Sequence[tuple[int, int]]:
        """(start, size) of the run of each rank of the first group, in its order."""

    @property
    @abstractmethod
    def layout(self) -> str:
        """How the parameter is sharded, for messages and for comparing ranks."""

    @property
    def leaf_key(self) -> Hashable:
        """The same for all parameters whose gradients one leaf of autograd gets."""
        return self.key

    @property
    def span(self) -> tuple[int, int]:
        """(offset, size) of this rank's run in its piece of the leaf."""
        return 0, self.values.numel()

    @property
    def replica(self) -> tuple[int, int]:
        """Which copy of its elements this rank has, and how many copies there are."""
        _, *replicas = self.groups
        place, number = 0, 1
        for group in replicas:
            place, number = place * group.size() + group.rank(), number * group.size()
        return place, number


Receive = Callable[[Tensor], None]


class GradientSource:
    """A leaf of autograd that gets gradients of this rank alone; see [Note: hooks on leaves].

    Args:
        leaf: the leaf; None if it does not exist yet.
        shard_group: the ranks that each have a piece of what the gradient is of; None if this
            rank has all of it.
        replica_groups: the ranks that have the same elements as this one, and other batches.
    """

    def __init__(
        self,
        leaf: Tensor | None,
        shard_group: dist.ProcessGroup | None = None,
        replica_groups: Iterable[dist.ProcessGroup] = (),
    ) -> None:
        self.shard_group = shard_group
        self.replica_groups = tuple(replica_groups)
        self._leaf = leaf
        self._handle: RemovableHandle | None = None

    def attach(self, receive: Receive) -> None:
        """Call ``receive`` with the gradient of every backward, until :meth:`detach`.

        It is called in the thread of the backward, without recording gradients of gradients, in
        the same order on all ranks that run the same model. What it gets belongs to autograd.
        """
        assert self._leaf is not None
        self.hook(self._leaf, receive)

    def detach(self) -> None:
        """Undo :meth:`attach`, also if that failed half-way. A second call does nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def own_part(self, gradient: Tensor) -> Tensor:
        """What :meth:`attach` promises of the gradient that autograd gives a hook of the leaf."""
        return gradient

    def hook(self, leaf: Tensor, receive: Receive) -> None:
        """Put the hook on the leaf."""

        def pass_on(gradient: Tensor) -> None:
            with torch.no_grad():
                receive(self.own_part(gradient))

        self._handle = leaf.register_hook(pass_on)  # type: ignore[no-untyped-call]

    def pieces(self, gradient: Tensor) -> Tensor:
        """A gradient as the pieces that the ranks of ``shard_group`` have: a copy, fp32.

        Args:
            gradient: as ``receive`` got it.

        Returns:
            [ranks, n]. A piece that is shorter than n elements ends with zeros.
        """
        raise NotImplementedError("a leaf without a shard_group has no pieces")


def padded_pieces(gradient: Tensor, num_ranks: int, num_elements: int) -> Tensor:
    """Equal pieces of a row-major gradient, fp32 [ranks, elements], that end with zeros."""
    pieces = gradient.new_empty((num_ranks, num_elements), dtype=torch.float32)
    flat = pieces.view(-1)
    flat[: gradient.numel()].view(gradient.shape).copy_(gradient)
    flat[gradient.numel() :].zero_()
    return pieces


class ParameterSource(GradientSource):
    """A parameter that no wrapper gathers: of a plain or DDP module, or sharded by TP."""

    def own_part(self, gradient: Tensor) -> Tensor:
        # Under sequence parallelism the gradient of a replicated parameter is a sum over the TP
        # ranks that is still pending (``Partial``). It is made here, before anything non-linear is
        # done to it.
        if is_dtensor(gradient) and is_dtensor(self._leaf):
            return resolved(gradient, self._leaf.placements)
        return gradient if gradient.layout is torch.strided else gradient.to_dense()
