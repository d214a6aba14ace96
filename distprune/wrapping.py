"""Models that are pruned first and wrapped second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from distprune.collectives import attempt, world
from distprune.masking.attach import Transaction, unregister
from distprune.masking.hook import PruningHook, find_hook, named_hooks
from distprune.shard import LocalShard
from distprune.sharding import ShardReader

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def shard_masks(model: nn.Module, *, group: ProcessGroup | None = None) -> int:
    """Shard the masks of a model that was pruned first and wrapped second.

    A model that was pruned on one process, the same way on every rank, and then wrapped in
    FSDP1, FSDP2, HSDP or column-wise tensor parallelism has sharded weights, but whole masks on
    every rank; under FSDP it also computes, and keeps, whole masked weights. After this call
    masks lie as their parameters do, as if the wrapped model had been pruned. (Pruning again
    does the same.) DDP needs no such call. Before row-wise tensor parallelism, which torch
    refuses for a pruned module, and before anything else that does not take a pruned module,
    use :func:`masks_aside`.

    Args:
        model: wrapped; the same on every rank.
        group: the ranks that call this; every rank by default. Collective.

    Returns:
        How many parameters had a whole mask.

    Raises:
        NotImplementedError: a wrapper or layout that is not supported, by name, on every rank;
            nothing has changed then.

    Cost: local, but for two all-reduces of 40 bytes. Masks are cut one by one.
    """
    communicator = world(group)
    transaction = Transaction()

    def shard_all() -> int:
        reader, num_sharded = ShardReader(), 0
        for path, name, hook in list(named_hooks(model)):
            module = model.get_submodule(path)
            if not reader.has_whole_mask(module, name):
                continue
            shard = reader.read(module, name, f"{path}.{name}")
            if shard.is_sharded:
                assert shard.mask is not None
                _attach(transaction, reader, module, name, hook, shard, shard.mask)
                num_sharded += 1
        return num_sharded

    with torch.inference_mode(False), torch.no_grad():
        num_sharded, error = attempt(shard_all)
        try:
            communicator.agree([("parameters with a whole mask", str(num_sharded))], error)
        except Exception:
            transaction.rollback()
            raise
    assert num_sharded is not None
    return num_sharded


@contextmanager
def masks_aside(model: nn.Module) -> Iterator[None]:
    """Take the masks off a model while it is wrapped, and put them back, sharded, afterwards.

    Inside the context the modules are ordinary ones: parameters stand under their own names
    with their unmasked values, and any wrapper takes them::

        with distprune.masks_aside(model):
            parallelize_module(model, mesh, plan)       # or fully_shard, accelerator.prepare, ...

    Args:
        model: pruned, not sharded yet, with the same masks on every rank. Wrappers have to
            keep its modules, as all of torch's do.

    Raises:
        NotImplementedError: on entry, a parameter that is sharded already; on exit, a wrapper
            or layout that is not supported.

    Cost: no copy of a weight or a mask.
    """
    reader = ShardReader()
    kept: list[tuple[nn.Module, str, PruningHook, Tensor]] = []
    for path, name, hook in named_hooks(model):
        module = model.get_submodule(path)
        if reader.read(module, name, f"{path}.{name}").is_sharded:
            raise NotImplementedError(
                f"{path}.{name} is sharded already; expected a model that was pruned and has not "
                "been wrapped yet. Masks that were made after wrapping need not be put aside."
            )
        kept.append((module, name, hook, module._buffers[f"{name}_mask"]))
    for module, name, _, _ in kept:
        if find_hook(module, name) is not None:  # else it is tied, and went with the first one
            Transaction().detach(module, name, None, None)
            unregister(module, name)
    try:
        yield
    finally:
        reader = ShardReader()
        with torch.inference_mode(False), torch.no_grad():
            for module, name, hook, mask in kept:
                if find_hook(module, name) is None:
                    shard = reader.read(module, name, f"{type(module).__name__}.{name}")
                    part = shard.slice_of(mask.to(shard.values.device))
                    _attach(Transaction(), reader, module, name, hook, shard, part)


def _attach(
    transaction: Transaction,
    reader: ShardReader,
    module: nn.Module,
    name: str,
    hook: PruningHook,
    shard: LocalShard,
    part: Tensor,
) -> None:
    """Put this rank's part of a whole mask on a module, with the hook that it had."""
    managed = reader.managed(module, name)
    if shard.is_sharded:  # else the mask goes on as it is
        part = shard.new_mask(torch.bool if managed is not None else part.dtype).copy_(part)
    transaction.attach(module, name, hook, shard.as_parameter_layout(part), managed)
