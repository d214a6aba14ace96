"""DTensors: tensor parallelism, FSDP2, HSDP and their combinations."""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils.weak import WeakIdKeyDictionary

from distprune.shards.geometry import (
    Fold,
    IndexMap,
    Split,
    dim_coordinates,
    index_map,
    memory_order,
)
from distprune.shards.shard import Shard

_SHARDED = (ShardPlacement, _StridedShard)  # the second is no subclass since torch 2.10


class _MeshView(NamedTuple):
    """A device mesh as seen from this rank. Slow to make, and never another: once per mesh.

    Attributes:
        shape: of the mesh.
        coordinate: of this rank; None if it is outside.
        ranks: global ranks, row-major.
        parts: where this rank's parts are, the replica, the number of replicas, and the layout in
            words: by shape, placements and wrapper.
    """

    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    ranks: tuple[int, ...]
    parts: dict[object, tuple[IndexMap, int, int, str]]


# By the object: a mesh equals one that another process group had before.
_views: MutableMapping[DeviceMesh, _MeshView] = WeakIdKeyDictionary()


def local_shard(
    name: str, parameter: DTensor, mask: Tensor | None, *, is_from_fsdp2: bool = True
) -> Shard:
    """Read this rank's part of a DTensor parameter.

    Args:
        name: for messages.
        parameter: on any mesh; this rank may be outside it, without elements.
        mask: the mask in force, laid out as the parameter.
        is_from_fsdp2: whether ``fully_shard`` made the outermost cut.

    Raises:
        NotImplementedError: a placement that is neither Shard nor Replicate; a ``_StridedShard``
            of another kind than FSDP2 makes; a mesh whose ranks do not ascend; a local tensor of
            another shape than the placements give.
    """
    mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
    view = _views.get(mesh)
    if view is None:
        coordinate, ranks = mesh.get_coordinate(), tuple(mesh.mesh.flatten().tolist())
        here = None if coordinate is None else tuple(coordinate)
        view = _views[mesh] = _MeshView(tuple(mesh.shape), here, ranks, {})
    is_here, key = view.coordinate is not None, (shape, placements, is_from_fsdp2)
    if key not in view.parts:
        _check_order(name, mesh, placements)
        _check_strided(name, shape, view.shape, placements, is_from_fsdp2)
        splits = splits_of(name, shape, view.shape, view.coordinate, placements)
        # Not which ranks: the same parameter may be on several meshes of one shape.
        layout = f"{placements} on a mesh of shape {view.shape}"
        replicas = replica_of(view.shape, view.coordinate, placements)
        view.parts[key] = (_index_of(shape, splits), *replicas, layout)
    index, replica, num_replicas, layout = view.parts[key]
    values, coordinates, fold = _local(parameter), index.coordinates, index.fold
    if not is_here:
        coordinates = tuple(range(0) for _ in shape)
        values = values.new_empty([0] * len(shape))
    elif values.numel() == 0 and values.ndim == len(coordinates):
        # An empty shard may be empty in dimensions that the placements leave whole.
        coordinates = tuple(c[:n] for c, n in zip(coordinates, values.shape, strict=True))
    expected = list(map(len, coordinates))
    if fold is not None and is_here:
        expected[fold.dim] *= expected.pop(fold.dim + 1)
        if not values.is_contiguous():
            raise NotImplementedError(
                f"{name}: {placements} of a shard of stride {values.stride()}; expected "
                "a contiguous shard where every rank has a part of several groups of rows."
            )
    if list(values.shape) != expected:
        raise NotImplementedError(
            f"{name}: this rank holds a shard of shape {tuple(values.shape)}, but "
            f"{placements} on a mesh of shape {view.shape} should give {tuple(expected)}. "
            "Expected the shards that distribute_tensor, parallelize_module or fully_shard make."
        )
    if coordinates is not index.coordinates or not values.is_contiguous():
        index = index_map(shape, coordinates, memory_order(values) or range(values.ndim))
    if mask is not None:
        mask = _local(mask) if is_here else torch.empty_like(values, dtype=mask.dtype)
    return Shard(
        name=name,
        parameter=parameter,
        values=values,
        mask=mask,
        shape=shape,
        index=index,
        replica=replica,
        num_replicas=num_replicas,
        ranks=view.ranks,
        layout=layout,
        mesh=mesh,
        placements=placements,
        key=id(parameter),
    )


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    with torch.no_grad():  # else to_local() is an operation of autograd, which takes longer
        return tensor.to_local().detach()


def _index_of(shape: Sequence[int], splits: Sequence[Split]) -> IndexMap:
    """Where the parts of cuts are; at most one cut is of groups, and no other of its dimension."""
    box, fold = tuple(shape), None
    for split in splits:
        if split.num_groups > 1:
            fold = Fold(split.dim, split.num_groups, shape[split.dim] // split.num_groups)
            box = fold.opened(shape)
            splits = [s._replace(dim=s.dim + (s.dim >= split.dim)) for s in splits]
            break
    return replace(index_map(box, dim_coordinates(box, splits), range(len(box))), fold=fold)


def _check_order(name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Refuse shards on ranks that do not ascend along their mesh axis.

    On such a mesh torch 2.13 contradicts itself. ``fully_shard`` and ``distribute_tensor`` hand
    out chunks in the order of the process group, which is sorted, while sizes, offsets in
    checkpoints and ``distribute_tensor(src_data_rank=None)`` follow the coordinate in the mesh. So
    checkpoints put rows into the wrong position, uneven tensors lose elements, and the replicas of
    HSDP may have different chunks.
    """
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Replicate) and mesh.mesh.diff(dim=axis).lt(0).any():
            raise NotImplementedError(
                f"{name}: the parameter is sharded ({placement}) along axis {axis} of a "
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
        dim, others = placement.dim % len(shape), _cuts_beside(axis, shape, mesh_shape, placements)
        num_chunks = mesh_shape[axis] * math.prod(mesh_shape[other] for other in others)
        if not others and placement.split_factor > 1:
            is_known = shape[dim] % (placement.split_factor * num_chunks) == 0
        else:
            later = [other for other in others if other > axis]
            is_known = placement.split_factor == math.prod(mesh_shape[other] for other in later)
            is_known &= all(isinstance(placements[other], ShardPlacement) for other in later)
            if shape[dim] % num_chunks:
                is_outermost = all(isinstance(other, Replicate) for other in placements[:axis])
                is_known &= is_from_fsdp2 and is_outermost
        if not is_known:
            raise NotImplementedError(
                f"{name}: placement {placement} (dimension {dim} of size {shape[dim]}, placements "
                f"{tuple(placements)} on a mesh of shape {tuple(mesh_shape)}) spreads rows that "
                "lie apart over the ranks, by several cuts of a dimension or unevenly; expected "
                "Shard, the placements that fully_shard makes over tensor parallelism, or one even "
                "cut of equal groups of rows. Keep the parameter in the shape in which it was "
                f"sharded, or call .redistribute() to Shard({dim}) before pruning."
            )


def _cuts_beside(
    axis: int, shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> list[int]:
    """The other axes that cut the dimension that a mesh axis cuts."""
    dims = [p.dim % len(shape) if isinstance(p, _SHARDED) else None for p in placements]
    return [
        other
        for other, dim in enumerate(dims)
        if other != axis and dim == dims[axis] and mesh_shape[other] > 1
    ]


def splits_of(
    name: str,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int] | None,
    placements: Sequence[Placement],
) -> list[Split]:
    """The cuts that placements describe, in the order in which they were made.

    FSDP2 over tensor parallelism records its cut as ``_StridedShard`` on the
    *left* mesh axis although it is made *after* those of the axes to its right.
    Walking placements from left to right, as torch's own helper does, is right
    only when that cut is even; so strided cuts come last here.

    Returns:
        For a rank outside the mesh the cuts of the first rank.

    Raises:
        NotImplementedError: a placement that is neither Shard nor Replicate.
    """
    plain: list[Split] = []
    strided: list[Split] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, _SHARDED):
            size, chunk = mesh_shape[axis], coordinate[axis] if coordinate else 0
            cut = Split(placement.dim % len(shape), size, chunk)
            if isinstance(placement, ShardPlacement):
                plain.append(cut)
            elif size > 1 and not _cuts_beside(axis, shape, mesh_shape, placements):
                strided.append(cut._replace(num_groups=placement.split_factor))
            else:
                strided.append(cut)
        elif not isinstance(placement, Replicate):
            raise NotImplementedError(
                f"{name}: placement {placement} is not supported; expected Shard or Replicate. "
                "Call .redistribute() to resolve it before pruning."
            )
    return plain + strided


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
