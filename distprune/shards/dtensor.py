"""DTensors: tensor parallelism, FSDP2, HSDP and their combinations."""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils.weak import WeakIdKeyDictionary

from distprune.base.pruned_form import local_tensor
from distprune.shards import geometry
from distprune.shards.geometry import Fold, IndexMap, Split, dim_coordinates, index_map
from distprune.shards.shard import Shard

_SHARDED = (ShardPlacement, _StridedShard)  # the second is no subclass since torch 2.10


# Slow to ask of a mesh, and never another: this rank's coordinate (None: it is outside), the global
# ranks, and, by shape, placements and wrapper, where this rank's parts are, the replica, the number
# of replicas, and the layout in words. By the object: a mesh equals one that another process group
# had before.
_Part = tuple[IndexMap, int, int, str]
_View = tuple[tuple[int, ...] | None, tuple[int, ...], dict[object, _Part]]
_views: MutableMapping[DeviceMesh, _View] = WeakIdKeyDictionary()


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
    if mesh not in _views:
        here, global_ranks = mesh.get_coordinate(), mesh.mesh.flatten().tolist()
        _views[mesh] = (None if here is None else tuple(here), tuple(global_ranks), {})
    coordinate, ranks, parts = _views[mesh]
    key = (shape, placements, is_from_fsdp2)
    if key not in parts:
        _check_order(name, mesh, placements)
        splits = splits_of(name, shape, mesh.shape, coordinate, placements, is_from_fsdp2)
        # Not which ranks: the same parameter may be on several meshes of one shape.
        layout = f"{placements} on a mesh of shape {tuple(mesh.shape)}"
        replicas = replica_of(mesh.shape, coordinate, placements)
        parts[key] = (_index_of(name, shape, splits), *replicas, layout)
    index, replica, num_replicas, layout = parts[key]
    values = _local(parameter)
    if coordinate is None:
        values = values.new_empty([0] * len(shape))
        mask = None if mask is None else torch.empty_like(values, dtype=mask.dtype)
    elif mask is not None:
        mask = _local(mask)
    if not values.numel():  # it may be empty in a dimension that the placements leave whole
        index = index_map(shape, list(map(range, values.shape)), range(len(shape)))
    else:
        expected, fold = list(map(len, index.coordinates)), index.fold
        if fold is not None:
            expected[fold.dim] *= expected.pop(fold.dim + 1)
        is_row_major = values.is_contiguous()
        if list(values.shape) != expected or not (fold is None or is_row_major):
            raise NotImplementedError(
                f"{name}: this rank holds a shard of shape {tuple(values.shape)} and stride "
                f"{values.stride()}, but {layout} should give {tuple(expected)}, row-major if it "
                "is parts of groups of rows. Expected the shards that distribute_tensor, "
                "parallelize_module or fully_shard make."
            )
        if not is_row_major:
            index = index_map(
                shape, index.coordinates, geometry.memory_order(values) or range(len(shape))
            )
    shard = Shard(name, parameter, values, mask, shape, index, False, replica, num_replicas)
    shard.ranks, shard.layout, shard.key = ranks, layout, id(parameter)
    shard.mesh, shard.placements = mesh, placements
    return shard


def _local(tensor: Tensor) -> Tensor:
    with torch.no_grad():  # else to_local() is an operation of autograd, which takes longer
        return local_tensor(tensor).detach()


def _index_of(name: str, shape: Sequence[int], splits: Sequence[Split]) -> IndexMap:
    """Where the parts of cuts are; at most one cut is of groups, and no other of its dimension."""
    folds = [Fold(dim, n, shape[dim] // n) for dim, _, _, n in splits if n > 1]
    if len(folds) > 1:
        raise NotImplementedError(f"{name}: parts of groups of rows in two dimensions.")
    for fold in folds:
        shape = fold.opened(shape)
        splits = [split._replace(dim=split.dim + (split.dim >= fold.dim)) for split in splits]
    index = index_map(shape, dim_coordinates(shape, splits), range(len(shape)))
    return replace(index, fold=folds[0]) if folds else index


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
                f"{name} is sharded ({placement}) along axis {axis} of a mesh whose ranks do not "
                f"ascend there: {mesh.mesh.tolist()}. torch contradicts itself in which rank holds "
                "which part of it; expected ascending ranks, as init_device_mesh makes them."
            )


def splits_of(
    name: str,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int] | None,
    placements: Sequence[Placement],
    is_from_fsdp2: bool = True,
) -> list[Split]:
    """The cuts that placements describe, in the order in which they were made.

    FSDP2 over tensor parallelism writes its cut, made last, as ``_StridedShard`` on an axis to the
    left of the other cuts of that dimension; the split factor is the product of the sizes of their
    axes. So strided cuts come last here. Walking placements from left to right, as torch's own
    helper does, is right only when that cut is even.

    A view of a DTensor that merges a dimension with a sharded one writes the same type, and means
    rows that lie apart. If all cuts are even then two placements with the pattern of FSDP2 mean the
    same, however they were made; if they are not, only FSDP2's own is a run. Where no other cut is
    of the dimension, each of ``split_factor`` groups is cut evenly: see geometry.[Note: folds].

    Returns:
        For a rank outside the mesh the cuts of the first rank.

    Raises:
        NotImplementedError: a placement that is neither Shard nor Replicate; a ``_StridedShard`` of
            another kind than these two.
    """
    axes_of: list[list[int]] = [[] for _ in shape]  # of more than one rank, that cut a dimension
    for axis, placement in enumerate(placements):
        if isinstance(placement, _SHARDED):
            axes_of[placement.dim] += [axis] * (mesh_shape[axis] > 1)
        elif not isinstance(placement, Replicate):
            raise NotImplementedError(
                f"{name}: placement {placement} is not supported; expected Shard or Replicate. "
                "Call .redistribute() to resolve it before pruning."
            )
    plain, strided = list[Split](), list[Split]()
    for axis, placement in enumerate(placements):
        if not isinstance(placement, _SHARDED):
            continue
        dim, axes = placement.dim % len(shape), axes_of[placement.dim]
        cut = Split(dim, mesh_shape[axis], coordinate[axis] if coordinate else 0)
        if not isinstance(placement, _StridedShard):
            plain.append(cut)
            continue
        factor, num_chunks = int(placement.split_factor), math.prod(mesh_shape[a] for a in axes)
        if axes == [axis]:
            cut = cut._replace(num_groups=factor)
        if axes == [axis] and factor > 1:
            is_known = shape[dim] % (factor * num_chunks) == 0
        else:
            later = [other for other in axes if other > axis]
            is_known = factor == math.prod(mesh_shape[other] for other in later)
            is_known &= all(isinstance(placements[other], ShardPlacement) for other in later)
            if shape[dim] % num_chunks:
                is_outermost = all(isinstance(other, Replicate) for other in placements[:axis])
                is_known &= is_from_fsdp2 and is_outermost
        if not is_known and mesh_shape[axis] > 1:
            raise NotImplementedError(
                f"{name}: {placement} of {tuple(placements)}, of a dimension of size {shape[dim]} "
                f"on a mesh of shape {tuple(mesh_shape)}, spreads rows that lie apart over the "
                "ranks; expected Shard, what fully_shard makes over tensor parallelism, or one "
                "even cut of equal groups of rows. Keep the parameter in the shape in which it was "
                f"sharded, or call .redistribute() to Shard({dim}) before pruning."
            )
        strided.append(cut)
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
