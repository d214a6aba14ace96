"""Pieces of FSDP1's flat parameters: runs of elements in the order of memory."""

from __future__ import annotations

from torch import Tensor

from distprune.shards.geometry import run_index_map
from distprune.shards.shard import FlatShard
from distprune.torch_private.managed import ManagedRun


def local_shard(
    name: str, piece: ManagedRun, mask: Tensor | None, ranks: tuple[int, ...]
) -> FlatShard:
    """Read this rank's run of a parameter.

    Args:
        name: for messages.
        piece: the wrapper's record of the parameter.
        mask: the mask in force: this rank's run of it, or, on a parameter that was pruned
            before it was wrapped, the whole.
        ranks: those of the piece, one tuple for all pieces of a wrapper.

    Raises:
        NotImplementedError: the parameter has gaps or overlaps in memory.
    """
    index = run_index_map(piece.shape, piece.stride, piece.start)
    if index is None:
        raise NotImplementedError(
            f"{name}: a parameter of shape {tuple(piece.shape)} and stride {tuple(piece.stride)} "
            "overlaps itself or has gaps; expected one that is dense in memory."
        )
    replica, num_replicas = piece.replica
    values = piece.values
    return FlatShard(
        name=name,
        parameter=values,
        values=values,
        mask=None if mask is None else mask.detach(),
        shape=piece.shape,
        coordinates=(),
        order=(0,),
        index=index,
        replica=replica,
        num_replicas=num_replicas,
        ranks=ranks,
        layout=piece.layout,
        key=piece.key,
    )
