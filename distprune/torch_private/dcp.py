"""torch.distributed.checkpoint: the only file that knows its private functions."""

from __future__ import annotations

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard


def written_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(sizes, offsets) of the part of a whole tensor that a checkpoint takes a shard for."""
    return compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )


def may_be_misplaced(tensor: DTensor) -> bool:
    """Whether :func:`written_box` may be wrong: torch 2.13 walks the cuts from left to right."""
    return any(isinstance(placement, _StridedShard) for placement in tensor.placements)
