"""Parameters of which each rank stores a run, gathered by code that distprune need not know.

DeepSpeed's ZeRO-3 is one such wrapper (see ``deepspeed``), and others are registered through
:mod:`distprune.layouts`. What they have in common is here: defaults for their records, and how a
mask acts on what is stored.

[Note: masks on stored values] Nothing says when such a wrapper gathers a parameter, or from which
of its copies. So the mask acts on what is stored: pruned elements are +0 in the run itself, and in
every other copy that a rank has of it, such as the fp32 one that an optimizer steps (the master).
From then on the gradient of each master is masked before its optimizer steps it, and the master
after the step, whatever the optimizer does (momentum, weight decay). What was pruned is lost, and
not only hidden as under the other wrappers.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from distprune.base.pruned_form import local_tensor, orig_key
from distprune.wrappers.managed import GradientSource, ManagedRun, padded_pieces
from distprune.wrappers.masked_value import RunMask

if TYPE_CHECKING:
    import torch.distributed as dist


class Kept(ABC):
    """One mask, and the tensors that it keeps at zero."""

    @property
    @abstractmethod
    def masters(self) -> Sequence[Tensor]:
        """Views of what the optimizer steps; none if the mask is gone."""

    @property
    @abstractmethod
    def has_dense_gradient(self) -> bool:
        """Whether the gradient is not to be masked for now."""

    @abstractmethod
    def mask_run(self, run: Tensor) -> None:
        """Set the pruned elements of a tensor like a master to +0, in place."""


# They live as long as their modules.
_kept: weakref.WeakSet[Kept] = weakref.WeakSet()
_handles: list[RemovableHandle] = []
# By their memory: masters, and the masks that act on them. Only while an optimizer steps.
_by_memory: dict[int, list[tuple[Tensor, Kept]]] = {}


def keep_masters(kept: Kept) -> None:
    """Mask the gradient before, and the masters after, every step from now on."""
    _kept.add(kept)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before))
        _handles.append(register_optimizer_step_post_hook(_after))


def drop_masters(kept: Kept) -> None:
    """Undo :func:`keep_masters`. A second call does nothing."""
    _kept.discard(kept)


@torch.no_grad()
def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # Masters move: some wrappers take them to the host between steps.
    _by_memory.clear()
    for kept in list(_kept):
        for master in filter(Tensor.numel, kept.masters):
            _by_memory.setdefault(_storage_of(master), []).append((master, kept))
    if not _kept:
        while _handles:
            _handles.pop().remove()
    for stepped, master, kept in _stepped_by(optimizer):
        gradient = stepped.grad
        if gradient is not None and not kept.has_dense_gradient:
            first = master.storage_offset() - stepped.storage_offset()
            kept.mask_run(gradient.view(-1)[first : first + master.numel()])


@torch.no_grad()
def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for _, master, kept in _stepped_by(optimizer):
        kept.mask_run(master)
    _by_memory.clear()


def _stepped_by(optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor, Kept]]:
    """What an optimizer steps now, and the masters in it with their masks."""
    for group in optimizer.param_groups:
        for stepped in group["params"]:
            for master, kept in _by_memory.get(_storage_of(stepped), ()):
                yield stepped, master, kept


def _storage_of(tensor: Tensor) -> int:
    """Identifies the memory of a tensor, or of what a DTensor holds; 0 if it has none."""
    try:
        address: int = local_tensor(tensor).untyped_storage()._cdata
        return address
    except (NotImplementedError, RuntimeError):  # sparse
        return 0


class StoredRun(ManagedRun):
    """One parameter of a wrapper that stores a run of its elements on each rank.

    A subclass defines the abstract properties, and whatever else differs from the defaults. It is
    made anew whenever the parameter is looked up, and should be cheap to make.

    Attributes:
        parameter: what modules register, a leaf of autograd: the same object before, during and
            after a forward. Its present shape and values do not matter.
        is_whole_in_backward: whether it is whole when a backward reaches it, with the gradient
            of this rank's batch; criteria of single batches need that.
    """

    parameter: nn.Parameter
    is_whole_in_backward: ClassVar[bool] = False

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Shape of the whole parameter."""

    @property
    @abstractmethod
    def owners(self) -> list[tuple[nn.Module, str]]:
        """Every (module, name) that has the parameter, by the names that are registered now."""

    @property
    @abstractmethod
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """Process groups of this rank: the ranks whose runs make up the whole parameter, and, for
        each axis of replicas, the ranks that have the same run."""

    @property
    @abstractmethod
    def runs(self) -> Sequence[tuple[int, int]]:
        """(start, size) of the run of each rank of the first group, in its order.

        In row-major order of the whole parameter. Sizes may differ, and be 0.
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
    def gradient(self) -> Tensor | None:
        """This rank's part of the reduced gradient, 1-d, or None: by default ``.grad`` if it is
        one."""
        gradient = self.parameter.grad
        if gradient is None or gradient.numel() != self.values.numel():
            return None
        return gradient.detach().reshape(-1)

    @property
    def loss_scale(self) -> float:
        """What gradients are multiplied by on their way back (loss scaling)."""
        return 1.0

    # What follows rarely differs.

    @property
    def key(self) -> Hashable:
        return ("stored", id(self.parameter))

    @property
    def stride(self) -> tuple[int, ...]:
        return torch.empty(self.shape, device="meta").stride()

    @property
    def start(self) -> int:
        return self.runs[self.groups[0].rank()][0]

    @property
    def layout(self) -> str:
        return f"{type(self).__name__}: runs {list(self.runs)}, {self.replica[1]} replicas"

    @property
    def unsupported(self) -> str | None:
        return None

    def check_fields(self) -> None:
        """Nothing private is used."""

    def free_gathered(self) -> None:
        """By default nothing stays gathered between a forward and the next."""

    def has_registered(self, module: nn.Module, name: str) -> bool:
        return module._parameters.get(name) is self.parameter

    def rename(self, old: str, new: str) -> None:
        """By default only modules know the name."""

    @property
    def optimizer_tensor(self) -> tuple[Tensor, slice | None]:
        return self.parameter, None

    def gradient_source(self) -> GradientSource:
        if not self.is_whole_in_backward:
            raise NotImplementedError(
                f"{type(self).__name__} does not show gradients of single ranks; expected a "
                'criterion of averaged gradients (unit="global_batch").'
            )
        return WholeGradient(self)

    def drop_gradient(self) -> None:
        self.parameter.grad = None

    @property
    def has_unreduced_gradient(self) -> bool:
        return False

    def write(self, values: Tensor) -> None:
        for stored in (self.values, *self.masters):
            stored.copy_(values)
        self.gather_again()

    def gather_again(self) -> None:
        """Bring up to date what a rank keeps of other ranks' runs, between forwards.

        It is called on every rank, in the same order, after values have changed.
        """

    def mask_gradients_with(self, mask: StoredMask) -> None:
        """Mask the reduced gradient, too, wherever it is used before an optimizer steps it."""

    def stop_masking_gradients(self, mask: StoredMask) -> None:
        """Undo :meth:`mask_gradients_with`."""


class WholeGradient(GradientSource):
    """A parameter that is whole while a backward passes it: see managed.[Note: hooks on leaves].

    Args:
        run: the parameter.
    """

    def __init__(self, run: StoredRun) -> None:
        self._run = run
        shards, *replicas = run.groups
        super().__init__(run.parameter, shards, replicas)

    def own_part(self, gradient: Tensor) -> Tensor:
        scale = self._run.loss_scale
        return gradient if scale == 1 else gradient / scale

    def pieces(self, gradient: Tensor) -> Tensor:
        runs = self._run.runs
        longest = max(size for _, size in runs)
        if all(start == min(n * longest, gradient.numel()) for n, (start, _) in enumerate(runs)):
            return padded_pieces(gradient, len(runs), longest)
        pieces = gradient.new_zeros((len(runs), longest), dtype=torch.float32)
        flat = gradient.reshape(-1)
        for piece, (start, size) in zip(pieces, runs, strict=True):
            piece[:size] = flat[start : start + size]
        return pieces


class StoredMask(RunMask, Kept):
    """The mask of one parameter at work: see [Note: masks on stored values].

    Args:
        run: the parameter.
    """

    def __init__(self, run: StoredRun) -> None:
        super().__init__()
        self._run = run

    def managed(self) -> StoredRun:
        return self._run

    def attach(self) -> None:
        super().attach()
        self._run.mask_gradients_with(self)
        keep_masters(self)

    def detach(self) -> None:
        super().detach()
        self._run.stop_masking_gradients(self)
        drop_masters(self)

    def is_attached(self) -> bool:
        return bool(self._hooks)

    def settle(self) -> None:
        for stored in (self._run.values, *self._run.masters):
            self.mask_run(stored)
        self._run.gather_again()

    def problem(self) -> str | None:
        copies = {"what the rank stores": [self._run.values], "a master": self._run.masters}
        for where, tensors in copies.items():
            for stored in tensors:
                number = int((stored[self.buffer == 0] != 0).sum())
                if number:
                    return f"{number} pruned elements are not zero in {where}"
        return None

    def value(self, module: nn.Module, name: str) -> Tensor:
        value: Tensor = getattr(module, orig_key(name))
        return value

    def mask_run(self, run: Tensor) -> None:
        """Set the pruned elements of a tensor like this rank's run to +0, in place."""
        run.masked_fill_((self.buffer == 0).to(run.device), 0)

    # What the steps of optimizers need.

    @property
    def masters(self) -> Sequence[Tensor]:
        return self._run.masters or (self._run.values,)

    # State dicts get this rank's run of the mask, as they get what else it stores.
    def saved(self) -> Tensor:
        return self.buffer

    def load(self, value: Tensor) -> str:
        mask = self.buffer
        if value.numel() == self._run.shape.numel() and value.shape != mask.shape:
            value = value.reshape(-1)[self._run.start : self._run.start + mask.numel()]
        if value.shape != mask.shape:
            return (
                f"{tuple(mask.shape)}, the run of this rank, as a model that is sharded in the "
                f"same way saves it, or the whole mask, {tuple(self._run.shape)}"
            )
        mask.copy_(value != 0)
        return ""
