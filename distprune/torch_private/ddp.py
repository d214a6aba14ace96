"""DistributedDataParallel: the only file that knows its private fields."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn.parallel import DistributedDataParallel


def active_wrapper() -> DistributedDataParallel | None:
    """The DDP wrapper whose forward is running, if any."""
    return DistributedDataParallel._active_ddp_module


def ignore_buffers(wrapper: DistributedDataParallel, fqns: Iterable[str]) -> None:
    """Stop DDP from broadcasting buffers before every forward.

    Masks are equal on all ranks from the beginning; broadcasting them would double the traffic
    of a step.
    """
    wrapper.parameters_to_ignore.update(fqns)
    # DDP decides by its previous list whether to broadcast, and fails on an empty new one.
    wrapper._assign_modules_buffers()  # type: ignore[no-untyped-call]
