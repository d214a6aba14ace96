"""DTensor: its private fields, and where torch.distributed.checkpoint (DCP) writes its shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from distprune._common.pruned_form import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def rebind(parameter: Tensor, values: Tensor) -> None:
    """Do ``parameter.data = values``, which has no effect on a DTensor, there too.

    Args:
        parameter: plain or a DTensor; it stays the same object.
        values: of this rank, detached; not copied.
    """
    (parameter._local_tensor if is_dtensor(parameter) else parameter).data = values


def doubtful_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(sizes, offsets) that DCP takes this rank's shard for, if they may be wrong; else None.

    They may be where FSDP2 cuts a shard of tensor parallelism: torch 2.13 walks the cuts from left
    to right.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    if not any(isinstance(placement, _StridedShard) for placement in tensor.placements):
        return None
    return compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
