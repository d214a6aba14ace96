"""Which block of a whole parameter the gradient on a rank is of, and which ranks count.

                        the gradient on a rank              ranks that run the same batches
plain, DDP, FSDP, HSDP  of the whole parameter              none
TP                      of this rank's part                 those of the mesh
FSDP2 over TP           of the part of a tensor-parallel    those along the tensor-parallel axes
                        rank, gathered over data ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from distprune.shards.geometry import dim_coordinates
from distprune.shards.shard import LocalShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class GradientBlock:
    """What the gradient of a parameter on this rank is of.

    Attributes:
        coordinates: a range per dimension of the whole parameter.
        batch_ranks: ranks that run the same batches as this one; None: the parameter does not tell.
        ranks: those of them whose gradients are of the same elements.
    """

    coordinates: tuple[range, ...]
    batch_ranks: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None


def gradient_block(shard: LocalShard, data_groups: Sequence[ProcessGroup]) -> GradientBlock:
    """The block of a parameter.

    Args:
        shard: this rank's part of the parameter.
        data_groups: the ranks that run other batches on it: see ``LocalGradients``.
    """
    mesh = shard.mesh
    coordinate = None if mesh is None else mesh.get_coordinate()
    if mesh is None:
        return GradientBlock(dim_coordinates(shard.shape, ()))
    if coordinate is None:  # outside of the mesh: no gradient comes, and no batch counts
        return GradientBlock(tuple(range(0) for _ in shard.shape), (), ())
    from torch.distributed.tensor import Replicate

    from distprune.shards.dtensor import splits_of

    assert shard.placements is not None
    data_ranks = [set(dist.get_process_group_ranks(group)) for group in data_groups]
    placements: list[Placement] = []
    same_batches: list[slice | int] = list(coordinate)
    same_elements: list[slice | int] = list(coordinate)
    for axis, placement in enumerate(shard.placements):
        along: list[slice | int] = list(coordinate)
        along[axis] = slice(None)
        members = set(mesh.mesh[tuple(along)].tolist())
        if len(members) == 1 or any(members <= ranks for ranks in data_ranks):
            placements.append(Replicate())  # gathered, or replicas with other batches
            continue
        placements.append(placement)
        same_batches[axis] = slice(None)
        if isinstance(placement, Replicate):
            same_elements[axis] = slice(None)
    if not any(isinstance(where, slice) for where in same_batches):
        return GradientBlock(dim_coordinates(shard.shape, ()))
    splits = splits_of(shard.name, len(shard.shape), tuple(mesh.shape), coordinate, placements)
    if any(split.num_groups > 1 for split in splits or ()):
        raise NotImplementedError(
            f"{shard.name}: the ranks have parts of groups of rows ({shard.layout}); expected "
            "whole dimensions. Of such a parameter, criteria take gradients element by element."
        )
    batch_ranks, ranks = (
        tuple(sorted(mesh.mesh[tuple(where)].flatten().tolist()))
        for where in (same_batches, same_elements)
    )
    return GradientBlock(dim_coordinates(shard.shape, splits or ()), batch_ranks, ranks)
