"""What torch's wrappers do not offer in public: one adapter file per wrapper.

FSDP1 and FSDP2 take parameters away from their modules: what is registered there changes
between shard and gathered copy. Their adapters describe each such parameter as a
:class:`Managed`; everything else in the library works on that description.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distprune._common.pruned_form import orig_key


class ShardMask(Protocol):
    """The mask of one managed parameter at work."""

    def attach(self) -> None:
        """Let the next all-gather, and the gradient, see the mask."""

    def detach(self) -> None:
        """Undo :meth:`attach`."""

    def is_attached(self) -> bool:
        """Whether the mask still acts."""

    def value(self, module: nn.Module, name: str) -> Tensor:
        """``module.<name>`` as the mask leaves it, in whatever state the wrapper has it."""

    def managed(self) -> Managed | None:
        """The wrapper's record of the parameter; None if the wrapper is gone."""


class Managed(Protocol):
    """One parameter that a wrapper shards and gathers.

    Attributes:
        key: the same for every name of a tied parameter.
        shape: of the whole parameter.
        owners: every (module, name) under which the wrapper registers it.
        unsupported: why a mask cannot act on it; None if it can.
        persists_mask: whether the mask is to be an ordinary buffer of the state dict; if not, the
            wrapper's :class:`ShardMask` puts it there.
    """

    @property
    def key(self) -> Hashable: ...

    @property
    def shape(self) -> torch.Size: ...

    @property
    def owners(self) -> list[tuple[nn.Module, str]]: ...

    @property
    def unsupported(self) -> str | None: ...

    @property
    def persists_mask(self) -> bool: ...

    def check_fields(self) -> None:
        """Raise NotImplementedError naming the private fields that this torch lacks."""

    def reshard(self) -> None:
        """Free the gathered copy if there is one: it was made without the mask to come."""

    def has_registered(self, module: nn.Module, name: str) -> bool:
        """Whether what a module has under a name is this parameter, in any of its forms."""

    def rename(self, old: str, new: str) -> None:
        """Tell the wrapper that what it registers as ``old`` is to be registered as ``new``."""

    def write(self, values: Tensor) -> None:
        """Overwrite this rank's shard."""

    def masked_by(self, mask: Tensor) -> ShardMask:
        """What lets a mask, laid out like the shard, act on the parameter."""


def managed_parameters(
    root: nn.Module | None = None, *, everywhere: bool = False
) -> dict[tuple[int, str], Any]:
    """Every parameter that a wrapper shards in this process, by (id(module), name).

    A leaf does not know the module that gathers it, and what is registered on it may be
    a gathered copy, so its type tells nothing.

    Args:
        root: a model whose FSDP1 modules may not be known yet.
        everywhere: look for FSDP1 modules among all Python objects (a fraction of a second).
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return {}
    from distprune.torch_private import fsdp1, fsdp2

    if everywhere:
        fsdp1.find_modules()
    found: dict[tuple[int, str], Any] = {}
    found.update(fsdp2.managed_parameters())
    found.update(fsdp1.managed_parameters(root))
    return found


def is_managed(module: nn.Module, name: str) -> bool:
    """Whether a wrapper has taken a parameter, pruned or not.

    Cost: a look at each parameter that FSDP2 shards, of 0.1 microseconds; no dictionary.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from distprune.torch_private import fsdp2

    names = (name, orig_key(name))
    return is_flattened(module, name) or any(fsdp2.is_managed(module, each) for each in names)


def is_flattened(module: nn.Module, name: str) -> bool:
    """Whether FSDP1 has taken a parameter, pruned or not."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from distprune.torch_private import fsdp1

    return any(fsdp1.is_managed(module, each) for each in (name, orig_key(name)))
