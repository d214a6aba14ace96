"""Un-averaged gradients: those of this rank alone, of one backward.

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
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from distprune._common.collectives import resolved
from distprune._common.pruned_form import is_dtensor

if TYPE_CHECKING:
    import torch.distributed as dist

Receive = Callable[[Tensor], None]


class GradientSource(ABC):
    """A leaf of autograd that gets gradients of this rank alone; see [Note: hooks on leaves].

    Attributes:
        shard_group: the ranks that each have a piece of what the gradient is of; None if this
            rank has all of it.
        replica_groups: the ranks that have the same elements as this one, and other batches.
    """

    shard_group: dist.ProcessGroup | None = None
    replica_groups: tuple[dist.ProcessGroup, ...] = ()

    @abstractmethod
    def attach(self, receive: Receive) -> None:
        """Call ``receive`` with the gradient of every backward, until :meth:`detach`.

        It is called in the thread of the backward, without recording gradients of gradients, in
        the same order on all ranks that run the same model. What it gets belongs to autograd.
        """

    @abstractmethod
    def detach(self) -> None:
        """Undo :meth:`attach`, also if that failed half-way. A second call does nothing."""

    def pieces(self, gradient: Tensor) -> Tensor:
        """A gradient as the pieces that the ranks of ``shard_group`` have: a copy, fp32.

        Args:
            gradient: as ``receive`` got it.

        Returns:
            [ranks, n]. A piece that is shorter than n elements ends with zeros.
        """
        raise NotImplementedError("a leaf without a shard_group has no pieces")


class ParameterSource(GradientSource):
    """A parameter that no wrapper gathers: of a plain or DDP module, or sharded by TP.

    Args:
        parameter: a leaf that requires a gradient.
        replica_groups: see :class:`GradientSource`.
    """

    def __init__(
        self, parameter: Tensor, replica_groups: tuple[dist.ProcessGroup, ...] = ()
    ) -> None:
        self.replica_groups = replica_groups
        self._parameter = parameter
        self._handle: RemovableHandle | None = None

    def attach(self, receive: Receive) -> None:
        parameter = self._parameter

        def hook(gradient: Tensor) -> None:
            with torch.no_grad():
                receive(_local(gradient, parameter))

        self._handle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _local(gradient: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a gradient, laid out like the parameter.

    Under sequence parallelism the gradient of a replicated parameter is a sum over the TP ranks
    that is still pending (``Partial``). It is made here, before anything non-linear is done to it.
    """
    if is_dtensor(gradient) and is_dtensor(parameter):
        return resolved(gradient, parameter.placements)
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
