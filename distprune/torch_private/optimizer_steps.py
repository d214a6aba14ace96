"""Masks on what optimizers step in the place of a parameter: before and after every step.

DeepSpeed and others keep an fp32 copy of parameters, whole or in part, which their optimizer
steps: the master. Its pruned elements have to stay zero. torch calls global hooks of this file
before and after a step of any optimizer; they are registered while there are masks to keep.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from distprune.torch_private.live_graphs import storage_of


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


def keep(kept: Kept) -> None:
    """Mask the gradient before, and the masters after, every step from now on."""
    _kept.add(kept)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before))
        _handles.append(register_optimizer_step_post_hook(_after))


def drop(kept: Kept) -> None:
    """Undo :func:`keep`. A second call does nothing."""
    _kept.discard(kept)


@torch.no_grad()
def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # Masters move: some wrappers take them to the host between steps.
    _by_memory.clear()
    for kept in list(_kept):
        for master in filter(Tensor.numel, kept.masters):
            _by_memory.setdefault(storage_of(master), []).append((master, kept))
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
            for master, kept in _by_memory.get(storage_of(stepped), ()):
                yield stepped, master, kept
