"""This rank's gradients of its parts of parameters: what ``.grad`` has, and where it comes from."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from distprune.base.pruned_form import is_dtensor
from distprune.ranks.collectives import Communicator, is_distributed, over_groups, world
from distprune.shards.shard import Shard
from distprune.wrappers import deepspeed
from distprune.wrappers.managed import GradientSource, StoredRun

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_trainable(shard: Shard) -> None:
    """Raise ValueError if a parameter is frozen: a backward gives it no gradient."""
    if not shard.optimizer_tensor[0].requires_grad:
        raise ValueError(f"{shard.name} is frozen; expected parameters that are trained.")


def local_gradient(shard: Shard) -> Tensor:
    """This rank's part of ``.grad``, laid out like ``shard.values``; not a copy.

    Raises:
        RuntimeError: there is no gradient, or it is not complete yet; names the parameter.
        NotImplementedError: a gradient of another layout than the parameter's.
    """
    if shard.managed is not None and shard.managed.has_unreduced_gradient:
        raise RuntimeError(
            f"{shard.name}: a backward without gradient synchronisation (no_sync) left what is not "
            "reduced yet; expected a call after the last backward of a step."
        )
    gradient = available_gradient(shard)
    if gradient is None:
        raise RuntimeError(
            f"{shard.name} has no gradient; expected a call after a backward that depends on it."
        )
    return gradient


def available_gradient(shard: Shard) -> Tensor | None:
    """This rank's part of what ``.grad`` has, laid out like ``shard.values``, or None.

    Raises:
        NotImplementedError: a gradient of another layout than the parameter's; ZeRO-1 and -2.
    """
    if not shard.values.numel():
        return shard.values
    if shard.managed is None and deepspeed.has_master(shard.parameter):
        raise NotImplementedError(
            f"{shard.name}: ZeRO-1 and ZeRO-2 leave each averaged gradient on the rank that steps "
            'it; expected unit="rank_batch", or ZeRO-3.'
        )
    gradient = shard.parameter.grad if shard.managed is None else shard.managed.gradient
    if gradient is None:
        return None
    if is_dtensor(gradient):
        if gradient.placements != shard.placements or gradient.device_mesh != shard.mesh:
            raise NotImplementedError(
                f"{shard.name}: its gradient has placements {gradient.placements}, and the "
                f"parameter {shard.placements}; expected the same. Redistribute .grad first."
            )
        with torch.no_grad():
            gradient = gradient.to_local()
    if gradient.layout is not torch.strided:
        raise NotImplementedError(
            f"{shard.name}: its gradient has layout {gradient.layout}; expected a dense one "
            "(an embedding with sparse=False)."
        )
    return gradient.detach()


def drop_gradient(shard: Shard) -> None:
    """Set ``.grad`` to None; of a parameter of FSDP1 those of its whole flat parameter."""
    if shard.managed is None:
        shard.parameter.grad = None
    else:
        shard.managed.drop_gradient()


def unaveraged_gradients(
    shards: Sequence[Shard], group: ProcessGroup | None = None
) -> list[GradientSource]:
    """Where the gradients of some parameters come from, before ranks average them.

    Args:
        shards: this rank's part of each parameter.
        group: the data-parallel ranks of parameters that FSDP does not shard; for plain ones every
            rank by default.

    Raises:
        ValueError: a parameter under tensor parallelism on some of the ranks, and no group; a
            group with ranks of its tensor parallelism.
    """
    sources: dict[Hashable, GradientSource] = {}
    for position, shard in enumerate(shards):
        record, key, offset = shard.managed, shard.key, 0
        if isinstance(record, StoredRun):
            key, (offset, _) = record.leaf_key, record.span
        if key not in sources:
            sources[key] = (
                GradientSource(shard.parameter, None, _replicas_of(shard, group))
                if record is None
                else record.gradient_source()
            )
        sources[key].runs[position] = slice(offset, offset + shard.values.numel())
    return list(sources.values())


def ranks_with_shards(shards: Iterable[Shard], group: ProcessGroup | None) -> Communicator:
    """All ranks of a group, every rank by default, and those that shard parameters with them."""
    if group is None:
        return world()
    groups, known = [group], set(dist.get_process_group_ranks(group))
    for shard in shards:
        for of_axis in () if shard.mesh is None else shard.mesh.get_all_groups():
            if not known.issuperset(dist.get_process_group_ranks(of_axis)):
                groups.append(of_axis)
                known = set(over_groups(groups).ranks)
    return over_groups(groups)


def _replicas_of(shard: Shard, group: ProcessGroup | None) -> tuple[ProcessGroup, ...]:
    """The data-parallel ranks of a parameter that no FSDP manages."""
    if not is_distributed():
        return ()
    every = group if group is not None else dist.group.WORLD
    assert every is not None  # is_distributed
    if shard.ranks is None:
        return (every,)
    mesh, ranks = set(shard.ranks), set(dist.get_process_group_ranks(every))
    if ranks <= mesh and (ranks == mesh or group is None):
        return ()
    if group is None or ranks & mesh != {dist.get_rank()}:
        raise ValueError(
            f"{shard.name} is sharded over {len(mesh)} of {len(ranks)} ranks; expected group=, the "
            "data-parallel ranks, or those of its mesh if there are no others."
        )
    return (every,)
