"""Plain tensors, which are whole on every rank that has them: one process, DDP, ignored by FSDP."""

from __future__ import annotations

from torch import Tensor

from distprune.shards.geometry import dim_coordinates, index_map, memory_order
from distprune.shards.shard import LocalShard


def local_shard(
    name: str, parameter: Tensor, mask: Tensor | None, replica: int, num_replicas: int
) -> LocalShard:
    """Read a plain parameter.

    Args:
        name: for messages.
        parameter: dense in memory, in any order of dimensions.
        mask: the mask in force, same shape.
        replica, num_replicas: this rank's place among those that take part.
    """
    values = parameter.detach()
    coordinates = dim_coordinates(values.shape, ())
    order = memory_order(values) or list(range(values.ndim))
    return LocalShard(
        name=name,
        parameter=parameter,
        values=values,
        mask=None if mask is None else mask.detach(),
        shape=values.shape,
        coordinates=coordinates,
        order=tuple(order),
        index=index_map(values.shape, coordinates, order),
        replica=replica,
        num_replicas=num_replicas,
        key=id(parameter),
    )
