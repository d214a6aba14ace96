"""Every parameter that a wrapper manages: the choice of adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn

from distprune.wrappers import deepspeed
from distprune.wrappers.managed import StoredRun

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from distprune.wrappers.fsdp2 import FSDP2Parameter

# A wrapper's record of a parameter: of a DTensor, or of a run. Both have the same methods.
Managed: TypeAlias = "FSDP2Parameter | StoredRun"


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

        records.update(fsdp2.managed_parameters())
        records.update(fsdp1.managed_parameters(root, everywhere=everywhere))
    for module in () if root is None else root.modules():
        for name in module._parameters:
            run = find_run(module, name)
            if run is not None:
                records[id(module), name] = run
    return records


def may_be_managed() -> bool:
    """Whether there may be parameters in this process whose type does not tell that they are cut.

    FSDP has none without a process group.
    """
    is_loaded = "deepspeed" in sys.modules or len(finders) > 1
    return is_loaded or ("torch.distributed.fsdp" in sys.modules and dist.is_initialized())


def is_managed(module: nn.Module, name: str) -> bool:
    """Whether a wrapper manages a parameter, pruned or not."""
    if is_flattened(module, name) or find_run(module, name) is not None:
        return True
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from distprune.wrappers import fsdp2

    return fsdp2.is_managed(module, name)


def is_flattened(module: nn.Module, name: str) -> bool:
    """Whether FSDP1 manages a parameter."""
    found = module._parameters.get(name)
    if found is None:  # without use_orig_params, or inside forward: a view of the flat parameter
        found = module.__dict__.get(name)
    elif is_piece_of_flat(found):
        return True
    base = found._base if isinstance(found, Tensor) else None
    return base is not None and is_piece_of_flat(base)


def is_flat(tensor: Tensor) -> bool:
    """Whether a tensor is a flat parameter of FSDP1: what a module registers for several."""
    return getattr(tensor, "_is_flat_param", False)


def is_piece_of_flat(tensor: Tensor) -> bool:
    """Whether a tensor is a flat parameter of FSDP1, or one of its pieces."""
    return is_flat(tensor) or getattr(tensor, "_fsdp_flattened", False)


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
