"""From a module's parameter, however it is wrapped, to this rank's part of it and its gradients.

Reads and changes no value. The reader first asks for a wrapper's record of the parameter, and only
then for the type of the tensor: after an evaluation FSDP2's root has plain gathered tensors
registered, which look like replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

from distprune.base.naming import NamedParameter, full_name, named_modules
from distprune.base.pruned_form import MASK, ORIG, is_dtensor, local_tensor, name_of_pruned_orig
from distprune.ranks.collectives import Communicator, grid, over_groups, over_mesh, world
from distprune.shards import geometry
from distprune.shards.factored import FactoredScores
from distprune.shards.shard import Shard, checksums
from distprune.wrappers import deepspeed, wrapper
from distprune.wrappers.held import find_held
from distprune.wrappers.managed import GradientSource, Managed, StoredRun

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# By (module, name): a score per element, or the factors of all scores.
Scores = Mapping[tuple[nn.Module, str], Tensor | FactoredScores]


class ShardReader:
    """Reads the parameters of one call.

    Args:
        replica, num_replicas: this rank's place among the ranks of the call, for
            parameters that are whole on every rank.
    """

    def __init__(self, replica: int = 0, num_replicas: int = 1) -> None:
        self._replicas = replica, num_replicas
        # Asked once, and not for each of many parameters.
        self._may_be_managed = wrapper.may_be_managed()
        # Made on demand: a call for one parameter may not need the records of all others.
        self._managed: dict[tuple[int, str], Managed] | None = None
        # By process groups: lists of ranks are long, and the same for many parameters.
        self._ranks: dict[tuple[ProcessGroup, ...], tuple[int, ...]] = {}

    def managed(self, module: nn.Module, name: str) -> Managed | None:
        """A wrapper's record of a parameter, pruned or not.

        Raises:
            NotImplementedError: the parameter belongs to an FSDP1 wrapper that is gone.
            RuntimeError: it was pruned first and sharded second.
        """
        key = name + ORIG
        original = module._parameters.get(key, module.__dict__.get(key))
        if original is not None and (is_dtensor(original) or wrapper.is_managed(module, key)):
            raise RuntimeError(
                f"{type(module).__name__}.{name} was pruned before it was sharded; expected a "
                "model that is wrapped first, or inside distprune.masks_aside(model)."
            )
        if not self._may_be_managed:
            return None
        held = find_held(module, name)
        if held is not None and held.record is not None:
            return held.record
        run = wrapper.find_run(module, name)
        if run is not None:
            return run
        if self._managed is None:
            self._managed = wrapper.managed_parameters()
        place = id(module), name
        if place not in self._managed and wrapper.is_flattened(module, name):
            self._managed = wrapper.managed_parameters(everywhere=True)
            if place not in self._managed:
                raise NotImplementedError(
                    f"{type(module).__name__}.{name} is a piece of an FSDP1 flat parameter whose "
                    "wrapper is gone; expected that the wrapped model is kept and used."
                )
        return self._managed.get(place)

    def read(self, module: nn.Module, name: str, label: str) -> Shard:
        """This rank's part of ``module.name``.

        Raises:
            AttributeError: no such attribute.
            TypeError: not a parameter.
            NotImplementedError: a layout, dtype or wrapper that is not supported.

        Cost: eight calls in Python for a plain parameter that is not pruned, if nothing is managed.
        """
        mask = module._buffers.get(name + MASK)
        parameter: Any = module._parameters.get(name if mask is None else name + ORIG)
        managed = None
        if self._may_be_managed or type(parameter) is not nn.Parameter:
            managed = self.managed(module, name)
            if managed is not None and managed.unsupported:
                raise NotImplementedError(f"{label}: {managed.unsupported}.")
            if isinstance(managed, StoredRun):
                return self._read_run(managed, label, mask)
            parameter = _registered(module, name, label) if managed is None else managed.parameter
        if (
            type(parameter) is not nn.Parameter
            or parameter.dtype not in _FLOATS
            or parameter.layout is not torch.strided
            or parameter.is_meta
        ):
            _check_kind(label, parameter)
            if is_dtensor(parameter):
                shard = local_shard(label, parameter, mask, is_from_fsdp2=managed is not None)
                shard.managed = managed
                return shard
        values = parameter.detach()
        shape, stride = values.shape, values.stride()
        # With gaps or overlaps, it is copied when it is read.
        index = geometry.run_index_map(shape, stride) or geometry.index_map(
            shape, list(map(range, shape)), range(len(shape))
        )
        mask = None if mask is None else mask.detach()
        shard = Shard(
            label, parameter, values, mask, shape, index, False, *self._replicas, key=id(parameter)
        )
        shard.is_held = self._may_be_managed and deepspeed.has_master(parameter)
        return shard

    def _read_run(self, run: StoredRun, label: str, mask: Tensor | None) -> Shard:
        """This rank's run of a parameter, whose mask is a run, too."""
        index = geometry.run_index_map(tuple(run.shape), tuple(run.stride), run.start)
        if index is None:
            raise NotImplementedError(
                f"{label}: shape {tuple(run.shape)} and stride {tuple(run.stride)} overlap or have "
                "gaps; expected a parameter that is dense in memory."
            )
        values, groups = run.values, tuple(run.groups)
        # FSDP1 with CPU offload moves masks to the accelerator, as all buffers, and not values.
        mask = None if mask is None else mask.detach().to(values.device)
        shard = Shard(label, values, values, mask, run.shape, index, True, *run.replica)
        if groups not in self._ranks:
            self._ranks[groups] = tuple(grid(groups))
        shard.ranks, shard.layout = self._ranks[groups], run.layout
        shard.key, shard.managed, shard.is_held = run.key, run, True
        return shard

    def communicator(self, module: nn.Module, name: str) -> Communicator | None:
        """The ranks over which a parameter is spread; None if it is not sharded."""
        if not self._may_be_managed and type(module._parameters.get(name)) is nn.Parameter:
            return None
        managed = self.managed(module, name)
        if isinstance(managed, StoredRun):
            return over_groups(managed.groups)
        parameter = module._parameters.get(name) if managed is None else managed.parameter
        return over_mesh(parameter.device_mesh) if is_dtensor(parameter) else None


# Slow to ask of a mesh, and never another: this rank's coordinate (None: it is outside), the global
# ranks, and, by shape, placements and wrapper, where this rank's parts are, the replica, the number
# of replicas, and the layout in words. By the object: a mesh equals one that another process group
# had before.
_views: Any = WeakIdKeyDictionary()


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
        _check_order(name, parameter)
        cut = mesh.shape, coordinate, placements
        # Not which ranks: the same parameter may be on several meshes of one shape.
        layout = f"{placements} on a mesh of shape {tuple(mesh.shape)}"
        parts[key] = (*geometry.placed(name, shape, *cut, is_from_fsdp2), layout)
    index, replica, num_replicas, layout = parts[key]
    with torch.no_grad():  # else to_local() is an operation of autograd, which takes longer
        values = local_tensor(parameter).detach()
        mask = None if mask is None else local_tensor(mask).detach()
    if coordinate is None:  # outside of the mesh, where DTensor has one dimension only
        values = values.new_empty([0] * len(shape))
        mask = None if mask is None else torch.empty_like(values, dtype=mask.dtype)
    if not values.numel():  # it may be empty in a dimension that the placements leave whole
        index = geometry.index_map(shape, list(map(range, values.shape)), range(len(shape)))
    else:
        expected, fold = list(map(len, index.coordinates)), index.fold
        if fold is not None:
            expected[fold[0]] *= expected.pop(fold[0] + 1)
        is_row_major = values.is_contiguous()
        if list(values.shape) != expected or not (fold is None or is_row_major):
            raise NotImplementedError(
                f"{name}: this rank holds a shard of shape {tuple(values.shape)} and stride "
                f"{values.stride()}; expected {tuple(expected)}, as {layout} should give, and "
                "row-major if it is parts of groups of rows."
            )
        if not is_row_major:
            order = geometry.memory_order(values) or range(len(shape))
            index = geometry.index_map(shape, index.coordinates, order)
    shard = Shard(name, parameter, values, mask, shape, index, False, replica, num_replicas)
    shard.ranks, shard.layout, shard.key = ranks, layout, id(parameter)
    shard.mesh, shard.placements, shard.is_held = mesh, placements, True
    return shard


def _check_order(name: str, parameter: DTensor) -> None:
    """Refuse shards on ranks that do not ascend along their mesh axis.

    On such a mesh torch 2.13 contradicts itself. ``fully_shard`` and ``distribute_tensor`` hand
    out chunks in the order of the process group, which is sorted, while sizes, offsets in
    checkpoints and ``distribute_tensor(src_data_rank=None)`` follow the coordinate in the mesh. So
    checkpoints put rows into the wrong position, uneven tensors lose elements, and the replicas of
    HSDP may have different chunks.
    """
    ranks = parameter.device_mesh.mesh
    for axis, placement in enumerate(parameter.placements):
        if geometry.is_cut(placement) and ranks.diff(dim=axis).lt(0).any():
            raise NotImplementedError(
                f"{name} is sharded ({placement}) along axis {axis} of a mesh whose ranks do not "
                f"ascend there: {ranks.tolist()}; expected ascending ranks."
            )


def local_part(label: str, what: str, tensor: Tensor, shard: Shard) -> Tensor:
    """This rank's part of scores or of a mask, from a whole tensor or a DTensor like the parameter.

    Whole tensors may be 1-d, row-major, as in torch; under FSDP1 a 1-d tensor is a rank's run, as
    its gradient is.

    Raises:
        ValueError: a shape or a layout other than the parameter's.
    """
    layout = ""
    if is_dtensor(tensor):
        layout = f" with {tensor.placements} on {tensor.device_mesh}"
        laid_out = tensor.shape, tensor.device_mesh, tuple(tensor.placements)
        if laid_out == (shard.shape, shard.mesh, shard.placements):
            with torch.no_grad():
                local = tensor.to_local().detach()
            # Outside of the mesh, where DTensor has one dimension only.
            return local if local.numel() else local.new_empty(shard.values.shape)
    else:
        if shard.is_run and tensor.shape == shard.values.shape != shard.shape:
            return tensor.detach()  # in the order of memory
        if not shard.is_run and tensor.ndim == 1 and tensor.numel() == shard.numel:
            tensor = tensor.view(shard.shape)
        if tensor.shape == shard.shape:
            return shard.slice_of(tensor.detach()).to(shard.values.device)
    raise ValueError(
        f"{label}: {what} has shape {tuple(tensor.shape)}{layout}; expected the whole parameter's "
        f"shape {tuple(shard.shape)}, or a tensor laid out like the parameter ({shard.layout})."
    )


def whole_checksum(tensor: Tensor, shard: Shard) -> str:
    """A checksum of a whole tensor, which must be equal on all ranks that slice their parts of it.

    Not of a tensor that is this rank's part already: a DTensor, or 1-d under FSDP1.
    """
    is_part = is_dtensor(tensor) or (shard.is_run and tensor.ndim == 1)
    if not shard.is_sharded or is_part:
        return "each rank's part"
    return str(checksums([tensor])[0])


def _registered(module: nn.Module, name: str, label: str) -> Tensor:
    """The parameter behind a name, by its own name or, when pruned, as name_orig."""
    original = module._parameters.get(name + ORIG)
    if original is not None and name + MASK in module._buffers:
        return original
    parameter = module._parameters.get(name)
    if parameter is None:
        value = getattr(module, name)  # AttributeError, as in torch
        what = "None" if value is None else f"a {type(value).__name__}"
        raise TypeError(f"{label} is {what}; expected a parameter of the module.")
    return parameter


def _check_kind(label: str, parameter: Tensor) -> None:
    dtype, is_lazy = parameter.dtype, nn.parameter.is_lazy(parameter)
    is_narrow = parameter.is_quantized or (dtype.is_floating_point and dtype.itemsize == 1)
    if is_lazy or is_narrow or parameter.layout is not torch.strided or parameter.is_meta:
        kind = "lazy" if is_lazy else f"of dtype {dtype} and layout {parameter.layout}"
        raise NotImplementedError(
            f"{label} is {kind} on the {parameter.device} device; expected a dense parameter with "
            "values, not quantised: materialise, dequantise or initialise it first."
        )


class Place(NamedTuple):
    """Where a model has a parameter.

    Attributes:
        key: the same for all places of a tied parameter.
        shape: of the whole parameter.
        pair: (module, name), with the plain full name.
        is_floating: whether the parameter is of real floating-point numbers.
    """

    key: Hashable
    shape: tuple[int, ...]
    pair: NamedParameter
    is_floating: bool

    def with_all(self, places: Iterable[Place]) -> NamedParameter:
        """The pair, with all places of its parameter."""
        return self.pair.with_places(place.pair for place in places)


def all_places(model: nn.Module) -> Iterator[Place]:
    """Every parameter at every place, in the order of registration."""
    managed = wrapper.managed_parameters(model)
    names_of: dict[int, list[str]] = {}
    for module_id, name in managed:
        names_of.setdefault(module_id, []).append(name)
    for path, module in named_modules(model):
        parameters = module._parameters.items()
        own = {n: p for n, p in parameters if p is not None and not wrapper.is_flat(p)}
        for name in dict.fromkeys([*own, *names_of.get(id(module), ())]):
            record = managed.get((id(module), name))
            key = id(own[name]) if record is None else record.key
            shape = (own[name] if record is None else record).shape
            plain = name_of_pruned_orig(name, module._buffers) or name
            pair = NamedParameter(module, plain, full_name(path, plain))
            is_floating = name not in own or own[name].is_floating_point()
            yield Place(key, tuple(shape), pair, is_floating)


def by_parameter(places: Iterable[Place]) -> dict[Hashable, list[Place]]:
    """The places of each parameter, by its key, in the order of their first ones."""
    found: dict[Hashable, list[Place]] = {}
    for place in places:
        found.setdefault(place.key, []).append(place)
    return found


def find_places(model: nn.Module, is_wanted: Callable[[Place], bool]) -> list[NamedParameter]:
    """Some parameters; a tied one once, with all its places."""
    return [
        next(filter(is_wanted, places)).with_all(places)
        for places in by_parameter(all_places(model)).values()
        if any(map(is_wanted, places))
    ]


def check_saveable(name: str, parameter: DTensor, *, is_gathered: bool = False) -> None:
    """Raise if DCP of this torch would write or read this rank's shard at a wrong offset.

    Args:
        is_gathered: whole tensors are written, which torch makes of parts of groups of rows without
            a mistake.

    Raises:
        NotImplementedError: names the parameter.
    """
    box = wrapper.doubtful_box(parameter)
    if box is None:
        return
    shard = local_shard(name, parameter, None)
    sizes, offsets = zip(*((len(rows), rows.start) for rows in shard.coordinates), strict=True)
    is_right = box == (sizes, offsets) or (0 in box[0] and 0 in sizes)
    if not (is_right if shard.index.fold is None else is_gathered):
        raise NotImplementedError(
            f"{name} (shape {tuple(parameter.shape)}, {parameter.placements} on a mesh of shape "
            f"{tuple(parameter.device_mesh.shape)}): torch {torch.__version__} cannot save or load "
            "uneven shards that FSDP2 cut out of tensor-parallel ones, nor parts of groups of "
            "rows; expected a size that the mesh divides, or a consolidated state dict."
        )


# Gradients: what ``.grad`` has, and where it comes from.


def check_trainable(shard: Shard) -> None:
    """Raise ValueError if a parameter is frozen: a backward gives it no gradient."""
    if not shard.optimizer_tensor[0].requires_grad:
        raise ValueError(f"{shard.name} is frozen; expected parameters that are trained.")


def local_gradient(shard: Shard) -> Tensor:
    """This rank's part of ``.grad``, laid out like ``shard.values``; not a copy.

    Raises:
        RuntimeError: there is no gradient, or it is not complete yet; names the parameter.
        NotImplementedError: a gradient of another layout than the parameter's.
    """
    if shard.managed is not None and shard.managed.has_unreduced_gradient:
        raise RuntimeError(
            f"{shard.name}: a backward without gradient synchronisation (no_sync) left what is not "
            "reduced yet; expected a call after the last backward of a step."
        )
    gradient = available_gradient(shard)
    if gradient is None:
        raise RuntimeError(
            f"{shard.name} has no gradient; expected a call after a backward that depends on it."
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
            'it; expected unit="rank_batch", or ZeRO-3.'
        )
    gradient = shard.parameter.grad if shard.managed is None else shard.managed.gradient
    if gradient is None:
        return None
    if is_dtensor(gradient):
        if gradient.placements != shard.placements or gradient.device_mesh != shard.mesh:
            raise NotImplementedError(
                f"{shard.name}: its gradient has placements {gradient.placements}, and the "
                f"parameter {shard.placements}; expected the same. Redistribute .grad first."
            )
        with torch.no_grad():
            gradient = gradient.to_local()
    if gradient.layout is not torch.strided:
        raise NotImplementedError(
            f"{shard.name}: its gradient has layout {gradient.layout}; expected a dense one "
            "(an embedding with sparse=False)."
        )
    return gradient.detach()


def drop_gradient(shard: Shard) -> None:
    """Set ``.grad`` to None; of a parameter of FSDP1 those of its whole flat parameter."""
    if shard.managed is None:
        shard.parameter.grad = None
    else:
        shard.managed.drop_gradient()


def unaveraged_gradients(
    shards: Sequence[Shard], group: ProcessGroup | None = None
) -> list[GradientSource]:
    """Where the gradients of some parameters come from, before ranks average them.

    Args:
        shards: this rank's part of each parameter.
        group: the data-parallel ranks of parameters that FSDP does not shard; for plain ones every
            rank by default.

    Raises:
        ValueError: a parameter under tensor parallelism on some of the ranks, and no group; a
            group with ranks of its tensor parallelism.
    """
    sources: dict[Hashable, GradientSource] = {}
    for position, shard in enumerate(shards):
        record, key, offset = shard.managed, shard.key, 0
        if isinstance(record, StoredRun):
            key, (offset, _) = record.leaf_key, record.span
        if key not in sources and record is not None:
            sources[key] = record.gradient_source()
        elif key not in sources:
            sources[key] = GradientSource(shard.parameter, None, _replicas_of(shard, group))
        sources[key].runs[position] = slice(offset, offset + shard.values.numel())
    return list(sources.values())


def ranks_with_shards(shards: Iterable[Shard], group: ProcessGroup | None) -> Communicator:
    """All ranks of a group, every rank by default, and those that shard parameters with them."""
    if group is None:
        return world()
    groups, known = [group], set(dist.get_process_group_ranks(group))
    for shard in shards:
        for of_axis in () if shard.mesh is None else shard.mesh.get_all_groups():
            if not known.issuperset(dist.get_process_group_ranks(of_axis)):
                groups.append(of_axis)
                known = set(over_groups(groups).ranks)
    return over_groups(groups)


def _replicas_of(shard: Shard, group: ProcessGroup | None) -> tuple[ProcessGroup, ...]:
    """The data-parallel ranks of a parameter that no FSDP manages."""
    if not dist.is_initialized():
        return ()
    every = group if group is not None else dist.group.WORLD
    assert every is not None  # it is initialised
    if shard.ranks is None:
        return (every,)
    mesh, ranks = set(shard.ranks), set(dist.get_process_group_ranks(every))
    if ranks <= mesh and (ranks == mesh or group is None):
        return ()
    if group is None or ranks & mesh != {dist.get_rank()}:
        raise ValueError(
            f"{shard.name} is sharded over {len(mesh)} of {len(ranks)} ranks; expected group=, the "
            "data-parallel ranks, or those of its mesh if there are no others."
        )
    return (every,)
