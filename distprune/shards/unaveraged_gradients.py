"""Where the un-averaged gradients of parameters are seen, and which ranks see others of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from distprune._common.process_groups import is_distributed
from distprune.shards.shard import LocalShard
from distprune.torch_private.gradient_source import GradientSource, ParameterSource
from distprune.torch_private.managed import Managed, ManagedRun
from distprune.torch_private.wrapper import gradients_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    shards: Sequence[LocalShard],
    managed: Sequence[Managed | None],
    group: ProcessGroup | None = None,
) -> list[LocalGradients]:
    """The leaves through which the gradients of some parameters come.

    Args:
        shards: this rank's part of each parameter.
        managed: a wrapper's record of each, if it has one.
        group: the data-parallel ranks of parameters that FSDP does not shard; for plain ones every
            rank by default.

    Raises:
        ValueError: a parameter under tensor parallelism on some of the ranks, and no group; a
            group with ranks of its tensor parallelism.
    """
    leaves: dict[Hashable, LocalGradients] = {}
    for position, (shard, record) in enumerate(zip(shards, managed, strict=True)):
        run = slice(0, shard.values.numel())
        key: Hashable = shard.key if shard.key is not None else id(shard.parameter)
        if isinstance(record, ManagedRun):
            offset, size = record.span
            run, key = slice(offset, offset + size), ("flat", id(record.wrapper))
        leaf = leaves.get(key)
        if leaf is None:
            if record is None:
                source: GradientSource = ParameterSource(
                    shard.parameter, _replicas_of(shard, group)
                )
            else:
                source = gradients_of(record)
            leaf = leaves[key] = LocalGradients(source)
        leaf.runs[position] = run
    return list(leaves.values())


def _replicas_of(shard: LocalShard, group: ProcessGroup | None) -> tuple[ProcessGroup, ...]:
    """The data-parallel ranks of a parameter that no FSDP manages."""
    if not is_distributed():
        return ()
    if shard.ranks is None:
        return (group if group is not None else _world(),)
    mesh = set(shard.ranks)
    ranks = set(dist.get_process_group_ranks(group if group is not None else _world()))
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
    assert group is not None
    return (group,)


def _world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None  # is_distributed
    return group
