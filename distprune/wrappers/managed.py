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

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from distprune.base.pruned_form import is_dtensor
from distprune.ranks.collectives import resolved


class Managed(ABC):
    """A wrapper's record of one parameter, which it takes away from the module that registers it.

    A record is made anew whenever the parameter is looked up, and should be cheap to make.

    Attributes:
        parameter: what an optimizer and modules have: the same object before, during and after a
            forward. Its present shape and values do not matter.
        tells_gathers: whether :meth:`hold` lets zeros be written before each gather; if not, they
            are written before each forward, and into what optimizers step in the run's place.
    """

    parameter: nn.Parameter
    tells_gathers: ClassVar[bool] = False

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Shape of the whole parameter."""

    @property
    @abstractmethod
    def owners(self) -> list[tuple[nn.Module, str]]:
        """Every (module, name) that has the parameter."""

    @property
    @abstractmethod
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """Process groups of this rank: the ranks whose parts make up the whole parameter, and, for
        each axis of replicas, the ranks that have the same part."""

    @property
    @abstractmethod
    def stored(self) -> Sequence[Tensor]:
        """All that this rank keeps of the parameter, each laid out like the mask."""

    @property
    @abstractmethod
    def gradient(self) -> Tensor | None:
        """This rank's part of the reduced gradient, or None."""

    @abstractmethod
    def gradient_source(self) -> GradientSource:
        """Where the un-averaged gradients of the parameter are seen."""

    # What follows rarely differs.

    @property
    def unsupported(self) -> str | None:
        """Why a mask cannot act on the parameter; None if it can."""
        return None

    @property
    def key(self) -> Hashable:
        """The same for every name of a tied parameter."""
        return id(self.parameter)

    @property
    def optimizer_tensor(self) -> tuple[Tensor, slice | None]:
        """The tensor registered with the optimizer, and this parameter's slice of it (None: all).

        The optimizer's state has tensors of the same form.
        """
        return self.parameter, None

    def has_registered(self, module: nn.Module, name: str) -> bool:
        """Whether a module has the parameter under a name, or a copy or view that a gather made."""
        return module._parameters.get(name) is self.parameter

    def free_gathered(self) -> None:  # noqa: B027
        """Free the gathered copy, if there is one between a forward and the next."""

    def hold(self, held: Any) -> None:  # noqa: B027
        """Let zeros, and the gradient, be held where only the wrapper knows when."""

    def release(self, held: Any) -> None:  # noqa: B027
        """Undo :meth:`hold`."""

    def drop_gradient(self) -> None:
        """Set ``.grad`` to None, and what else the wrapper keeps together with it."""
        self.parameter.grad = None

    @property
    def has_unreduced_gradient(self) -> bool:
        """Whether gradients of backward passes without synchronisation wait for their reduction."""
        return False

    def of_leaf(self, gradient: Tensor) -> Tensor:
        """The gradient of this parameter in what its ``gradient_source`` receives: a view."""
        return gradient


class StoredRun(Managed):
    """One parameter of which each rank stores a run of elements, in the order of memory.

    A subclass defines ``parameter``, the abstract properties, and whatever else differs from the
    defaults.

    Attributes:
        is_whole_in_backward: whether ``parameter`` is whole when a backward reaches it, with the
            gradient of this rank's batch; criteria of single batches need that.
    """

    is_whole_in_backward: ClassVar[bool] = False

    @property
    @abstractmethod
    def runs(self) -> Sequence[tuple[int, int]]:
        """(start, size) of the run of each rank of the first group, in its order.

        In the order of the whole parameter's memory. Sizes may differ, and be 0.
        """

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """This rank's run, 1-d: a view of the memory from which the wrapper gathers."""

    @property
    def masters(self) -> Sequence[Tensor]:
        """Other copies of this rank's run, each a view: what optimizers step, in fp32 say.

        They are looked up before every step of any optimizer.
        """
        return ()

    @property
    def stored(self) -> Sequence[Tensor]:
        return [self.values, *self.masters]

    @property
    def gradient(self) -> Tensor | None:
        """This rank's part of the reduced gradient, 1-d, or None: by default ``.grad`` if it is
        one."""
        gradient = self.parameter.grad
        if gradient is None or gradient.numel() != self.values.numel():
            return None
        return gradient.detach().reshape(-1)

    def gather_again(self) -> None:
        """Bring up to date what a rank keeps of other ranks' runs, between forwards.

        It is called on every rank, in the same order, after values have changed.
        """

    @property
    def stride(self) -> tuple[int, ...]:
        """Stride of the whole parameter: runs follow its memory."""
        return torch.empty(self.shape, device="meta").stride()

    @property
    def start(self) -> int:
        """Where this rank's run begins in the memory of the whole parameter."""
        return self.runs[self.groups[0].rank()][0]

    @property
    def replica(self) -> tuple[int, int]:
        """Which copy of its elements this rank has, and how many copies there are."""
        place, number = 0, 1
        for group in self.groups[1:]:
            place, number = place * group.size() + group.rank(), number * group.size()
        return place, number

    @property
    def layout(self) -> str:
        """How the parameter is sharded, for messages and for comparing ranks."""
        return f"{type(self).__name__}: runs {list(self.runs)}, {self.replica[1]} replicas"

    def gradient_source(self) -> GradientSource:
        if not self.is_whole_in_backward:
            raise NotImplementedError(
                f"{type(self).__name__} does not show gradients of single ranks; expected a "
                'criterion of averaged gradients (unit="global_batch").'
            )
        shards, *replicas = self.groups
        return GradientSource(self.parameter, shards, replicas, self._unscaled, self._pieces)

    @property
    def leaf_key(self) -> Hashable:
        """The same for all parameters whose gradients one leaf of autograd gets."""
        return self.key

    @property
    def span(self) -> tuple[int, int]:
        """(offset, size) of this rank's run in its piece of the leaf."""
        return 0, self.values.numel()

    def _unscaled(self, gradient: Tensor) -> Tensor:
        """The gradient of this rank, of what autograd gives: without a scale of the loss."""
        return gradient

    def _pieces(self, gradient: Tensor) -> Tensor:
        runs = self.runs
        flat, longest = gradient.reshape(-1), max(size for _, size in runs)
        pieces = gradient.new_zeros((len(runs), longest), dtype=torch.float32)
        for piece, (start, size) in zip(pieces, runs, strict=True):
            piece[:size] = flat[start : start + size]
        return pieces

    # The mask in state dicts.

    def mask_in_state_dict(self, run: Tensor) -> Any:
        """What a state dict gets of a mask, given this rank's run; None: nothing, on this rank."""
        return run

    def run_in_state_dict(self, saved: Any) -> Tensor:
        """This rank's run of what :meth:`mask_in_state_dict` returned, or of a whole mask.

        Raises:
            ValueError: of another form; says what was expected.
        """
        size = self.values.numel()
        if saved.shape == (size,):
            return saved
        if saved.shape != self.shape:
            raise ValueError(
                f"this rank's {size} elements of the mask, as a model that is sharded in the same "
                f"way saves them, or the whole mask, {tuple(self.shape)}"
            )
        in_memory = torch.empty_strided(self.shape, self.stride, dtype=torch.bool)
        in_memory.copy_(saved != 0)
        return in_memory.as_strided((self.shape.numel(),), (1,))[self.start : self.start + size]


# [Note: replaced methods] An object of a wrapper has the users of the functions that stand in for
# some of its methods; the functions stand there as long as there are any.
_USERS = "_distprune_users"


def replace_methods(owner: Any, key: Hashable, user: Any, **functions: Callable[..., Any]) -> None:
    """Call functions, with the owner first, in the place of its methods of their names."""
    owner.__dict__.setdefault(_USERS, {})[key] = user
    for name, function in functions.items():
        owner.__dict__[name] = functools.partial(_call, function, weakref.ref(owner))


def restore_methods(owner: Any, key: Hashable, user: Any, *names: str) -> bool:
    """Undo :func:`replace_methods`; whether there is no other user."""
    users = users_of(owner)
    if users.get(key) is not user:
        return False
    del users[key]
    if not users:
        for name in (_USERS, *names):
            del owner.__dict__[name]
    return not users


def users_of(owner: Any) -> dict[Hashable, Any]:
    """Those for which functions stand in for methods of an object."""
    return owner.__dict__.get(_USERS, {})


def _call(function: Callable[..., Any], owner: weakref.ref[Any], *args: Any, **kwargs: Any) -> Any:
    return function(owner(), *args, **kwargs)  # it owns this, so it is there


@dataclass(eq=False)
class GradientSource:
    """A leaf of autograd that gets gradients of this rank alone; see [Note: hooks on leaves].

    Attributes:
        leaf: the leaf; None if it does not exist yet.
        shard_group: the ranks that each have a piece of what the gradient is of; None if this
            rank has all of it.
        replica_groups: the ranks that have the same elements as this one, and other batches.
        own_part: makes this rank's part of the gradient that autograd gives a hook of the leaf.
        pieces: makes what the ranks of ``shard_group`` have of that part: a copy, fp32 [ranks, n].
            A piece that is shorter than n elements ends with zeros.
        runs: by number of a parameter, where this rank's part of it is in this rank's piece of the
            leaf, 1-d. Without a ``shard_group`` there is one, and the leaf is the part.
    """

    leaf: Tensor | None
    shard_group: dist.ProcessGroup | None = None
    replica_groups: Sequence[dist.ProcessGroup] = ()
    own_part: Callable[[Tensor], Tensor] | None = None
    pieces: Callable[[Tensor], Tensor] = torch.Tensor.float
    runs: dict[int, slice] = field(default_factory=dict)
    _handle: RemovableHandle | None = None

    @property
    def data_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The ranks that run other batches on the same parameters: groups like axes of a grid."""
        shards = () if self.shard_group is None else (self.shard_group,)
        return (*shards, *self.replica_groups)

    def attach(self, receive: Callable[[Tensor], None]) -> None:
        """Call ``receive`` with the gradient of every backward, until :meth:`detach`.

        It is called in the thread of the backward, without recording gradients of gradients, in
        the same order on all ranks that run the same model. What it gets belongs to autograd.
        """
        own_part = self.own_part or functools.partial(_resolved, self.leaf)

        def pass_on(gradient: Tensor) -> None:
            with torch.no_grad():
                receive(own_part(gradient))

        assert self.leaf is not None
        self._handle = self.leaf.register_hook(pass_on)  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Undo :meth:`attach`, also if that failed half-way. A second call does nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _resolved(leaf: Tensor | None, gradient: Tensor) -> Tensor:
    """This rank's part of the gradient of a parameter that no wrapper gathers.

    Under sequence parallelism the gradient of a replicated parameter is a sum over the TP ranks
    that is still pending. It is made here, before anything non-linear is done to it.
    """
    if is_dtensor(gradient) and is_dtensor(leaf):
        return resolved(gradient, leaf.placements)
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def padded_pieces(gradient: Tensor, num_ranks: int, num_elements: int) -> Tensor:
    """Equal pieces of a row-major gradient, fp32 [ranks, elements], that end with zeros."""
    pieces = gradient.new_empty((num_ranks, num_elements), dtype=torch.float32)
    flat = pieces.view(-1)
    flat[: gradient.numel()].view(gradient.shape).copy_(gradient)
    flat[gradient.numel() :].zero_()
    return pieces
