"""This rank's part of a parameter's gradient, averaged or not, whatever keeps it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from distprune.base.pruned_form import is_dtensor
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import is_distributed, over_groups, world
from distprune.shards.shard import Shard
from distprune.wrappers import deepspeed
from distprune.wrappers.managed import GradientSource, ManagedRun, ParameterSource

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_trainable(shard: Shard) -> None:
    """Raise ValueError if a parameter is frozen: a backward gives it no gradient."""
    if not shard.optimizer_tensor[0].requires_grad:
        raise ValueError(
            f"{shard.name} is frozen (requires_grad=False), so it has no gradient; expected "
            "parameters that are trained. Leave it out, or call requires_grad_() on it for as "
            "long as gradients are collected (the base weights under LoRA, say)."
        )


def local_gradient(shard: Shard) -> Tensor:
    """This rank's part of ``.grad``, laid out like ``shard.values``; not a copy.

    Raises:
        RuntimeError: there is no gradient, or it is not complete yet; names the parameter.
        NotImplementedError: a gradient of another layout than the parameter's.
    """
    if shard.managed is not None and shard.managed.has_unreduced_gradient:
        raise RuntimeError(
            f"{shard.name}: a backward without gradient synchronisation (no_sync, "
            "set_requires_gradient_sync(False)) left gradients that the ranks have not reduced "
            "yet; expected a call after the last backward of a step, which reduces them."
        )
    gradient = available_gradient(shard)
    if gradient is None:
        raise RuntimeError(
            f"{shard.name} has no gradient; expected a call after backward() and before "
            "zero_grad(). If the loss does not depend on this parameter, leave it out."
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
            'it; expected a criterion of single batches (unit="rank_batch"), or ZeRO-3.'
        )
    gradient = shard.parameter.grad if shard.managed is None else shard.managed.gradient
    if gradient is None:
        return None
    if is_dtensor(gradient):
        if gradient.placements != shard.placements or gradient.device_mesh != shard.mesh:
            raise NotImplementedError(
                f"{shard.name}: its gradient has placements {tuple(gradient.placements)}, and the "
                f"parameter {shard.placements}; expected the same. Assign "
                ".grad.redistribute(placements=parameter.placements) to .grad first."
            )
        with torch.no_grad():
            gradient = gradient.to_local()
    if gradient.layout is not torch.strided:
        raise NotImplementedError(
            f"{shard.name}: its gradient has layout {gradient.layout}; expected a dense one. Make "
            "the embedding with sparse=False."
        )
    return gradient.detach()


def drop_gradient(shard: Shard) -> None:
    """Set ``.grad`` to None; of a parameter of FSDP1 those of its whole flat parameter."""
    if shard.managed is None:
        shard.parameter.grad = None
    else:
        shard.managed.drop_gradient()


@dataclass(frozen=True)
class LocalGradients:
    """A leaf of autograd, and the parameters whose gradients come with its own.

    Attributes:
        source: the leaf.
        runs: by position of a parameter, where this rank's part of it is in this rank's piece
            of the leaf, 1-d. Without a ``shard_group`` there is one, and the leaf is the part.
    """

    source: GradientSource
    runs: dict[int, slice] = field(default_factory=dict)

    @property
    def data_groups(self) -> tuple[ProcessGroup, ...]:
        """The ranks that run other batches on the same parameters: groups like axes of a grid."""
        shards = self.source.shard_group
        return ((shards,) if shards is not None else ()) + self.source.replica_groups


def unaveraged_gradients(
    shards: Sequence[Shard], group: ProcessGroup | None = None
) -> list[LocalGradients]:
    """The leaves through which the gradients of some parameters come.

    Args:
        shards: this rank's part of each parameter.
        group: the data-parallel ranks of parameters that FSDP does not shard; for plain ones every
            rank by default.

    Raises:
        ValueError: a parameter under tensor parallelism on some of the ranks, and no group; a
            group with ranks of its tensor parallelism.
    """
    leaves: dict[Hashable, LocalGradients] = {}
    for position, shard in enumerate(shards):
        record = shard.managed
        run = slice(0, shard.values.numel())
        key: Hashable = shard.key if shard.key is not None else id(shard.parameter)
        if isinstance(record, ManagedRun):
            offset, size = record.span
            run, key = slice(offset, offset + size), record.leaf_key
        leaf = leaves.get(key)
        if leaf is None:
            if record is None:
                replicas = _replicas_of(shard, group)
                source: GradientSource = ParameterSource(shard.parameter, None, replicas)
            else:
                source = record.gradient_source()
            leaf = leaves[key] = LocalGradients(source)
        leaf.runs[position] = run
    return list(leaves.values())


def ranks_with_shards(shards: Iterable[Shard], group: ProcessGroup | None) -> Communicator:
    """All ranks of a group, every rank by default, and those that shard parameters with them."""
    if group is None:
        return world()
    groups, known = [group], set(dist.get_process_group_ranks(group))
    for shard in shards:
        mesh = shard.mesh
        if mesh is None or known.issuperset(shard.ranks or ()):
            continue
        for axis in range(mesh.ndim):
            of_axis = mesh.get_group(axis)
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
    if group is None:
        raise ValueError(
            f"{shard.name} is on a mesh of {len(mesh)} of {len(ranks)} ranks, and nothing tells "
            "whether the others have replicas of it, with other batches; expected group= (a "
            "process group): the data-parallel ranks, this rank and those that have the same "
            "part of the parameter, or the ranks of the mesh if there are no others."
        )
    if ranks & mesh != {dist.get_rank()}:
        raise ValueError(
            f"{shard.name} is sharded over the ranks {sorted(mesh)}, of which group= holds "
            f"{sorted(ranks & mesh)}; expected the data-parallel ranks, which have the same part "
            "of the parameter as this rank: gradients of different parts are never added up."
        )
    return (every,)
