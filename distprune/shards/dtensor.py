"""DTensors: tensor parallelism, FSDP2, HSDP and their combinations."""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils.weak import WeakIdKeyDictionary

from distprune.base.pruned_form import is_dtensor
from distprune.shards.geometry import (
    IndexMap,
    Split,
    dim_coordinates,
    index_map,
    memory_order,
    opened,
)
from distprune.shards.shard import Shard
from distprune.wrappers.managed import ManagedDTensor

_SHARDED = (ShardPlacement, _StridedShard)  # the second is no subclass since torch 2.10


@dataclass(frozen=True)
class _MeshView:
    """A device mesh as seen from this rank. Slow to make, and never another: once per mesh.

    Attributes:
        shape: of the mesh.
        coordinate: of this rank; None if it is outside.
        ranks: global ranks, row-major.
        unordered: axes along which the ranks do not always ascend.
        parts: where this rank's parts are, the replica, the number of replicas, and the layout in
            words: by shape, placements and wrapper.
    """

    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    ranks: tuple[int, ...]
    unordered: tuple[int, ...]
    parts: dict[object, tuple[IndexMap, int, int, str]] = field(default_factory=dict)


# By the object: a mesh equals one that another process group had before.
_views: MutableMapping[DeviceMesh, _MeshView] = WeakIdKeyDictionary()


def local_shard(
    name: str,
    parameter: DTensor,
    mask: Tensor | None,
    managed: ManagedDTensor | None = None,
    *,
    is_from_fsdp2: bool = True,
) -> Shard:
    """Read this rank's part of a DTensor parameter.

    Args:
        name: for messages.
        parameter: on any mesh; this rank may be outside it, without elements.
        mask: the mask in force, laid out as the parameter.
        managed: the record of ``fully_shard``, if it is known.
        is_from_fsdp2: whether ``fully_shard`` made the outermost cut.

    Raises:
        NotImplementedError: a placement that is neither Shard nor Replicate; a ``_StridedShard``
            of another kind than FSDP2 makes; a mesh whose ranks do not ascend; a local tensor of
            another shape than the placements give.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    view = _views.get(mesh)
    if view is None:
        coordinate, ranks = mesh.get_coordinate(), mesh.mesh
        view = _views[mesh] = _MeshView(
            tuple(mesh.shape),
            None if coordinate is None else tuple(coordinate),
            tuple(ranks.flatten().tolist()),
            tuple(axis for axis in range(mesh.ndim) if ranks.diff(dim=axis).lt(0).any()),
        )
    key = (parameter.shape, placements, is_from_fsdp2)
    if key not in view.parts:
        _check_order(name, mesh, placements, view)
        _check_strided(name, parameter.shape, view.shape, placements, is_from_fsdp2)
        splits = splits_of(name, parameter.ndim, view.shape, view.coordinate, placements)
        box, splits, fold = opened(parameter.shape, splits or ())
        coordinates = dim_coordinates(box, splits)
        if view.coordinate is None:
            coordinates = tuple(range(0) for _ in box)
        index = replace(index_map(box, coordinates, range(len(box))), fold=fold)
        # Not which ranks: the same parameter may be on several meshes of one shape.
        layout = f"{placements} on a mesh of shape {view.shape}"
        view.parts[key] = (index, *replica_of(view.shape, view.coordinate, placements), layout)
    index, replica, num_replicas, layout = view.parts[key]
    values, coordinates, fold = _local(parameter), index.coordinates, index.fold
    if values.numel() == 0 and values.ndim == len(coordinates):
        # An empty shard may be empty in dimensions that the placements leave whole.
        coordinates = tuple(
            rows[:size] for rows, size in zip(coordinates, values.shape, strict=True)
        )
    expected = list(map(len, coordinates))
    if fold is not None:
        expected[fold.dim] *= expected.pop(fold.dim + 1)
        if not values.is_contiguous():
            raise NotImplementedError(
                f"{name}: {placements} of a shard of stride {values.stride()}; expected "
                "a contiguous shard where every rank has a part of several groups of rows."
            )
    if view.coordinate is None:
        values = values.new_empty(expected)
    if list(values.shape) != expected:
        raise NotImplementedError(
            f"{name}: this rank holds a shard of shape {tuple(values.shape)}, but "
            f"{placements} on a mesh of shape {view.shape} should give {tuple(expected)}. "
            "Expected the shards that distribute_tensor, parallelize_module or fully_shard make."
        )
    if coordinates is not index.coordinates or not values.is_contiguous():
        order = memory_order(values) or range(values.ndim)
        index = index_map(parameter.shape, coordinates, order)
    if mask is not None:
        assert is_dtensor(mask)
        is_here = view.coordinate is not None
        mask = _local(mask) if is_here else torch.empty_like(values, dtype=mask.dtype)
    return Shard(
        name=name,
        parameter=parameter,
        values=values,
        mask=mask,
        shape=parameter.shape,
        index=index,
        replica=replica,
        num_replicas=num_replicas,
        ranks=view.ranks,
        layout=layout,
        mesh=mesh,
        placements=placements,
        key=id(parameter),
        managed=managed,
    )


def _local(tensor: DTensor) -> Tensor:
    with torch.no_grad():  # else to_local() is an operation of autograd, which takes longer
        return tensor.to_local().detach()


def _check_order(
    name: str, mesh: DeviceMesh, placements: Sequence[Placement], view: _MeshView
) -> None:
    """Refuse shards on ranks that do not ascend along their mesh axis.

    On such a mesh torch 2.13 contradicts itself. ``fully_shard`` and ``distribute_tensor`` hand
    out chunks in the order of the process group, which is sorted, while sizes, offsets in
    checkpoints and ``distribute_tensor(src_data_rank=None)`` follow the coordinate in the mesh. So
    checkpoints put rows into the wrong position, uneven tensors lose elements, and the replicas of
    HSDP may have different chunks.
    """
    for axis in view.unordered:
        if not isinstance(placements[axis], Replicate):
            raise NotImplementedError(
                f"{name}: the parameter is sharded ({placements[axis]}) along axis {axis} of a "
                f"mesh whose ranks do not ascend along that axis: {mesh.mesh.tolist()}. torch cuts "
                "by the order of the process group in some places and by the mesh in others there, "
                "so which rank holds which part is not well defined; expected ascending ranks, as "
                "init_device_mesh makes them."
            )


def _check_strided(
    name: str,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    is_from_fsdp2: bool,
) -> None:
    """Refuse every ``_StridedShard`` but two kinds: a run of rows, and runs of groups of rows.

    Where no other cut is of the dimension, each of ``split_factor`` groups is cut evenly: see
    geometry.[Note: folds].

    FSDP2 over tensor parallelism writes its cut, made last, as ``_StridedShard`` on an axis to the
    left of the other cuts of that dimension; the split factor is the product of the sizes of
    their axes. A view of a DTensor that merges a dimension with a sharded one writes the same
    type, and means rows that lie apart. If all cuts are even then two placements with the pattern
    of FSDP2 mean the same, however they were made; if they are not, only FSDP2's own is a run.
    """
    for axis, placement in enumerate(placements):
        if not isinstance(placement, _StridedShard) or mesh_shape[axis] == 1:
            continue
        dim = placement.dim % len(shape)
        cuts = [
            (other_axis, other)
            for other_axis, other in enumerate(placements)
            if isinstance(other, _SHARDED) and other.dim % len(shape) == dim
        ]
        to_the_right = [(other_axis, other) for other_axis, other in cuts if other_axis > axis]
        num_chunks = math.prod(mesh_shape[other_axis] for other_axis, _ in to_the_right)
        is_pattern = placement.split_factor == num_chunks and all(
            isinstance(other, ShardPlacement) for _, other in to_the_right
        )
        is_even = shape[dim] % math.prod(mesh_shape[other_axis] for other_axis, _ in cuts) == 0
        is_outermost = all(isinstance(other, Replicate) for other in placements[:axis])
        if is_pattern and (is_even or (is_from_fsdp2 and is_outermost)):
            continue
        groups = _num_groups(axis, len(shape), mesh_shape, placements)
        if groups > 1 and shape[dim] % (groups * mesh_shape[axis]) == 0:
            continue
        raise NotImplementedError(
            f"{name}: placement {placement} (dimension {dim} of size {shape[dim]}, placements "
            f"{tuple(placements)} on a mesh of shape {tuple(mesh_shape)}) spreads rows that lie "
            "apart over the ranks, by several cuts of a dimension or unevenly; expected Shard, the "
            "placements that fully_shard makes over tensor parallelism, or one even cut of equal "
            "groups of rows. Keep the parameter in the shape in which it was sharded, or call "
            f".redistribute() to Shard({dim}) before pruning."
        )


def _num_groups(
    axis: int, ndim: int, mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> int:
    """How many groups of rows a mesh axis cuts; 1 if it is not the only cut of the dimension."""
    placement = placements[axis]
    if not isinstance(placement, _StridedShard) or mesh_shape[axis] == 1:
        return 1
    others = (
        other
        for other_axis, other in enumerate(placements)
        if other_axis != axis and mesh_shape[other_axis] > 1
    )
    dims = [other.dim % ndim for other in others if isinstance(other, _SHARDED)]
    return 1 if placement.dim % ndim in dims else int(placement.split_factor)


def splits_of(
    name: str,
    ndim: int,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int] | None,
    placements: Sequence[Placement],
) -> list[Split] | None:
    """The cuts that placements describe, in the order in which they were made.

    FSDP2 over tensor parallelism records its cut as ``_StridedShard`` on the
    *left* mesh axis although it is made *after* those of the axes to its right.
    Walking placements from left to right, as torch's own helper does, is right
    only when that cut is even; so strided cuts come last here.

    Returns:
        None for a rank outside the mesh.

    Raises:
        NotImplementedError: a placement that is neither Shard nor Replicate.
    """
    plain: list[Split] = []
    strided: list[Split] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, _SHARDED):
            if coordinate is not None:
                cuts = strided if isinstance(placement, _StridedShard) else plain
                groups = _num_groups(axis, ndim, mesh_shape, placements)
                size, chunk = mesh_shape[axis], coordinate[axis]
                cuts.append(Split(placement.dim % ndim, size, chunk, groups))
        elif not isinstance(placement, Replicate):
            raise NotImplementedError(
                f"{name}: placement {placement} is not supported; expected Shard or Replicate. "
                "Call .redistribute() to resolve it before pruning."
            )
    return None if coordinate is None else plain + strided


def replica_of(
    mesh_shape: Sequence[int], coordinate: Sequence[int] | None, placements: Sequence[Placement]
) -> tuple[int, int]:
    """Which copy of its elements a rank has, and how many copies there are."""
    replica, num_replicas = 0, 1
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            replica = replica * mesh_shape[axis] + (coordinate[axis] if coordinate else 0)
            num_replicas *= mesh_shape[axis]
    return replica, num_replicas
