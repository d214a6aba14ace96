"""Every parameter that a wrapper manages: the choice of adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from distprune.wrappers import deepspeed, masked_value
from distprune.wrappers.managed import Managed
from distprune.wrappers.stored_run import StoredRun

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def managed_parameters(
    root: nn.Module | None = None, *, everywhere: bool = False
) -> dict[tuple[int, str], Managed]:
    """Every parameter that FSDP shards in this process, by (id(module), registered name).

    And those of a model, if one is given, that are stored as runs (``layouts.register``).

    A leaf does not know the module that gathers it, and the parameter registered on it may be a
    gathered copy, so its type says nothing.

    Args:
        root: a model whose FSDP1 modules may not be known yet.
        everywhere: search all Python objects for FSDP1 modules (a fraction of a second).
    """
    records: dict[tuple[int, str], Managed] = {}
    if "torch.distributed.fsdp" in sys.modules:
        from distprune.wrappers import fsdp1, fsdp2

        if everywhere:
            fsdp1.find_modules()
        records.update(fsdp2.managed_parameters())
        records.update(fsdp1.managed_parameters(root))
    if root is not None:
        records.update(runs_below(root))
    return records


def may_be_managed() -> bool:
    """Whether there may be parameters in this process whose type does not tell that they are cut.

    FSDP has none without a process group.
    """
    is_loaded = "deepspeed" in sys.modules or len(finders) > 1
    return is_loaded or ("torch.distributed.fsdp" in sys.modules and dist.is_initialized())


def plain_class(module: nn.Module) -> type:
    """The class of a module before FSDP2 or a mask gave it a subclass of it."""
    base = masked_value.base_class(module)
    if "torch.distributed.fsdp" not in sys.modules:
        return base
    from distprune.wrappers import fsdp2

    return fsdp2.plain_class(base)


def is_managed(module: nn.Module, name: str) -> bool:
    """Whether a wrapper manages a parameter, pruned or not.

    Cost: 0.1 microseconds for each parameter that FSDP2 shards; no dictionary.
    """
    if find_run(module, name) is not None:
        return True
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from distprune.wrappers import fsdp2

    return is_flattened(module, name) or fsdp2.is_managed(module, name)


def is_flattened(module: nn.Module, name: str) -> bool:
    """Whether FSDP1 manages a parameter."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from distprune.wrappers.fsdp1 import is_managed

    return is_managed(module, name)


def is_flat(tensor: Tensor) -> bool:
    """Whether a tensor is a flat parameter of FSDP1: what a module registers for several."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from distprune.wrappers import fsdp1

    return fsdp1.is_flat(tensor)


def is_piece_of_flat(tensor: Tensor) -> bool:
    """Whether a tensor is a flat parameter of FSDP1, or one of its pieces."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from distprune.wrappers import fsdp1

    return fsdp1.is_piece(tensor)


def active_ddp() -> DistributedDataParallel | None:
    """The DDP wrapper whose forward is running, if any."""
    ddp = sys.modules.get("torch.nn.parallel.distributed")
    return None if ddp is None else ddp.DistributedDataParallel._active_ddp_module


def ignore_buffers(wrapper: DistributedDataParallel, fqns: Iterable[str]) -> None:
    """Stop DDP from broadcasting buffers before every forward.

    Masks are equal on all ranks from the beginning; broadcasting them would double the traffic
    of a step.
    """
    wrapper.parameters_to_ignore.update(fqns)
    # DDP decides by its previous list whether to broadcast, and fails on an empty new one.
    wrapper._assign_modules_buffers()  # type: ignore[no-untyped-call]


# (module, name that it registers) -> the record of the parameter; None if it is none of its kind
Finder = Callable[[nn.Module, str], StoredRun | None]

finders: list[Finder] = [deepspeed.find]


def find_run(module: nn.Module, name: str) -> StoredRun | None:
    """The record of a parameter; None if no finder knows it."""
    if name in module._parameters:
        for finder in finders:
            record = finder(module, name)
            if record is not None:
                return record
    return None


def runs_below(root: nn.Module) -> Iterator[tuple[tuple[int, str], StoredRun]]:
    """Every record below a model, by (id(module), registered name)."""
    for module in root.modules():
        for name in module._parameters:
            record = find_run(module, name)
            if record is not None:
                yield (id(module), name), record
