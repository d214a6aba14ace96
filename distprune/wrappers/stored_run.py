"""Parameters of which each rank stores a run, gathered by code that distprune need not know.

DeepSpeed's ZeRO-3 is one such wrapper (see ``deepspeed``), and others are registered through
:mod:`distprune.layouts`. Nothing says when such a wrapper gathers a parameter, or from which of its
copies, so zeros are held in the run itself and in every other copy that a rank has of it, such as
the fp32 one that an optimizer steps (the master). See ``held``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from distprune.wrappers.managed import GradientSource, ManagedRun, padded_pieces

if TYPE_CHECKING:
    import torch.distributed as dist


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
        """Every (module, name) that has the parameter."""

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

    @property
    def stored(self) -> Sequence[Tensor]:
        return [self.values, *self.masters]

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
