"""FSDP2 (``fully_shard``, ``replicate``): its record of a parameter; its private fields.

:meth:`ManagedParameter.check_fields` names a private field that a new torch version lacks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DDPMeshInfo,
    FSDPMeshInfo,
    TrainingState,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from distprune.wrappers import private_fields
from distprune.wrappers.managed import (
    GradientSource,
    HoldsZeros,
    ManagedDTensor,
    Receive,
    padded_pieces,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


@dataclass(frozen=True)
class ManagedParameter(ManagedDTensor):
    """One parameter that FSDP2 shards.

    Attributes:
        fsdp_param: FSDP2's own record of it.
        group: the parameters that are gathered together with it.
    """

    fsdp_param: FSDPParam
    group: FSDPParamGroup
    persists_mask = True  # a mask is a DTensor like the parameter, and is saved and loaded like it

    @property
    def sharded(self) -> DTensor:
        parameter: Tensor = self.fsdp_param.sharded_param
        assert isinstance(parameter, DTensor)
        return parameter

    @property
    def plain_replacement(self) -> Tensor | None:
        parameter: Tensor = self.fsdp_param.sharded_param
        return None if isinstance(parameter, DTensor) else parameter

    @property
    def key(self) -> Hashable:
        return id(self.fsdp_param.sharded_param)

    @property
    def shape(self) -> torch.Size:
        return self.fsdp_param.sharded_param.shape

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        return _owners(self.fsdp_param)

    @property
    def unsupported(self) -> str | None:
        return None

    def free_gathered(self) -> None:
        # After evaluation the root keeps its gathered copy. A prefetch before a forward that ended
        # early, or unshard(async_op=True), leaves a gather in flight, of a group that still counts
        # as sharded; the next forward would use its result, so wait for it and free it as well.
        self.group.wait_for_unshard()
        if self.fsdp_param.sharded_state != ShardedState.SHARDED:
            # Not reshard(): a forward that raised left the group in its forward state, where
            # that does nothing for a root.
            self.group._to_sharded()  # type: ignore[no-untyped-call]

    def has_registered(self, module: nn.Module, name: str) -> bool:
        registered = module._parameters.get(name)
        copies = ("_unsharded_param", "_sharded_post_forward_param")
        is_copy = self.fsdp_param.sharded_state != ShardedState.SHARDED and any(
            registered is getattr(self.fsdp_param, field, None) for field in copies
        )
        is_shard = registered is self.fsdp_param.sharded_param
        return registered is not None and (is_shard or is_copy)

    def hold(self, held: HoldsZeros) -> None:
        self.free_gathered()  # it was gathered without this mask
        of_group = self.group.__dict__.setdefault(_HELD, {})
        of_group[id(self.fsdp_param)] = held
        self.group.__dict__["unshard"] = functools.partial(_unshard, weakref.ref(self.group))

    def release(self, held: HoldsZeros) -> None:
        self.free_gathered()
        of_group = self.group.__dict__.get(_HELD, {})
        if of_group.get(id(self.fsdp_param)) is held:
            del of_group[id(self.fsdp_param)]
            if not of_group:
                del self.group.__dict__[_HELD], self.group.__dict__["unshard"]

    @property
    def optimizer_tensor(self) -> tuple[Tensor, slice | None]:
        return self.sharded, None

    def gradient_source(self) -> GatheredSource:
        return GatheredSource(self)

    @property
    def gradient(self) -> Tensor | None:
        gradient = self.sharded.grad
        if gradient is None:
            return None
        assert isinstance(gradient, DTensor)
        return gradient._local_tensor

    def drop_gradient(self) -> None:
        self.sharded.grad = None

    @property
    def has_unreduced_gradient(self) -> bool:
        gathered = getattr(self.fsdp_param, "_unsharded_param", None)
        return (
            self.fsdp_param.unsharded_accumulated_grad is not None
            or (gathered is not None and gathered.grad is not None)
            or self.group._partial_reduce_output is not None  # HSDP without its all-reduce
        )

    def write(self, values: Tensor) -> None:
        self.free_gathered()  # no gather may be reading the shard
        self.sharded.to_local().copy_(values)

    def check_fields(self) -> None:
        info = getattr(self.fsdp_param, "_module_info", None)
        objects = {"FSDPParam": self.fsdp_param, "FSDPParamGroup": self.group}
        private_fields.check("FSDP2", objects | {"ParamModuleInfo": info})


_HELD = "_distprune_held"


def _unshard(group_ref: weakref.ref[FSDPParamGroup], async_op: bool = False) -> None:
    """Set the pruned elements of a group to zero, then gather it: FSDP2 calls it as its own.

    Not before a backward, which gathers what its forward gathered.
    """
    group = group_ref()
    assert group is not None  # it owns what calls this
    state = group._training_state
    if state != TrainingState.PRE_BACKWARD and not group.is_unsharded:
        # In the stream that reads the shards, which has waited for the optimizer.
        info = group.mesh_info
        is_gathered = isinstance(info, FSDPMeshInfo) and info.shard_mesh_size > 1
        stream = group.device_handle.current_stream()
        if is_gathered:
            stream, _ = group.comm_ctx.get_all_gather_streams(async_op, state)
        with group.device_handle.stream(stream):
            for held in group.__dict__[_HELD].values():
                held.zero()
    type(group).unshard(group, async_op)  # type: ignore[no-untyped-call]


def managed_parameters() -> dict[tuple[int, str], ManagedParameter]:
    """Every parameter that FSDP2 shards in this process, by (id(module), name)."""
    records: dict[tuple[int, str], ManagedParameter] = {}
    for group in _groups():
        _notice_loaded(group)
        for fsdp_param in group.fsdp_params:
            managed = ManagedParameter(fsdp_param, group)
            for module, name in _owners(fsdp_param):
                records[id(module), name] = managed
    return records


def _notice_loaded(group: FSDPParamGroup) -> None:
    """Let FSDP2 take notice of loaded parameters, as its first forward does.

    A loader that fills a model after ``fully_shard``, as ``from_pretrained`` of transformers does,
    leaves FSDP2's record with tensors on the meta device.
    """
    if group._reset_sharded_params:
        return
    for fsdp_param in group.fsdp_params:
        info, known = fsdp_param._module_info, fsdp_param.sharded_param
        registered = info.module._parameters.get(info.param_name)
        if (
            registered is not known
            and known.is_meta
            and isinstance(registered, DTensor)
            and isinstance(known, DTensor)
            and (registered.shape, registered._spec.mesh, registered.placements)
            == (known.shape, known._spec.mesh, known.placements)
        ):
            with torch.no_grad():
                fsdp_param.reset_sharded_param()


def is_managed(module: nn.Module, name: str) -> bool:
    """Whether FSDP2 shards what it registers on a module under a name."""
    for group in _groups():
        for fsdp_param in group.fsdp_params:
            info = fsdp_param._module_info
            if info.module is module and info.param_name == name:
                return True
            # A first forward asks this of every pruned parameter: no list of owners for each.
            if info.shared_modules and any(
                owner is module and own_name == name for owner, own_name in _owners(fsdp_param)
            ):
                return True
    return False


def _owners(fsdp_param: FSDPParam) -> list[tuple[nn.Module, str]]:
    info = fsdp_param._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def plain_class(cls: type) -> type:
    """The class of which ``fully_shard`` made a subclass; the class itself if it made none."""
    return next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))


def _groups() -> Iterator[FSDPParamGroup]:
    seen: set[int] = set()
    states = _composable_state._module_state_mapping
    for reference in list(states.values()) if states else ():  # asking takes less than walking
        state = reference()
        if not isinstance(state, FSDPState) or id(state) in seen:
            continue
        seen.add(id(state))
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch < 2.12 has at most one
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        yield from groups


_REPLACED = "init_unsharded_param"


class GatheredSource(GradientSource):
    """The gathered copy of one parameter: see managed.[Note: hooks on leaves].

    FSDP2 makes the copy at the first gather and keeps the object.

    Args:
        managed: the parameter.
    """

    def __init__(self, managed: ManagedParameter) -> None:
        super().__init__(None)
        self._fsdp_param: FSDPParam = managed.fsdp_param
        self._receive: Receive | None = None
        self._hooked: weakref.ref[Tensor] | None = None
        info = self._fsdp_param.mesh_info
        if isinstance(info, FSDPMeshInfo) and info.shard_mesh_size > 1:
            self.shard_group = info.shard_process_group
        if isinstance(info, DDPMeshInfo):  # HSDP, or torch's composable replicate()
            self.replica_groups = (info.replicate_process_group,)

    def attach(self, receive: Receive) -> None:
        self._receive = receive
        self.hook_gathered()
        _Gathers.of(self._fsdp_param).add(self)

    def detach(self) -> None:
        _Gathers.of(self._fsdp_param).drop(self)
        super().detach()
        self._receive = self._hooked = None

    def hook_gathered(self) -> None:
        """Put the hook on the gathered copy, if there is one and the hook is not there yet."""
        gathered: Tensor | None = getattr(self._fsdp_param, "_unsharded_param", None)
        if gathered is None or (self._hooked is not None and self._hooked() is gathered):
            return
        assert self._receive is not None  # it is attached
        # FSDP2 gives the copy the parameter's requires_grad only when it registers it.
        requires_grad = gathered.requires_grad
        gathered.requires_grad_(True)
        self.hook(gathered, self._receive)
        gathered.requires_grad_(requires_grad)
        self._hooked = weakref.ref(gathered)

    def own_part(self, gradient: Tensor) -> Tensor:
        # Under TP: this rank's part, after the sum that sequence parallelism leaves open.
        return self._fsdp_param._get_grad_inner_tensor(gradient)

    def pieces(self, gradient: Tensor) -> Tensor:
        fsdp_param, info = self._fsdp_param, self._fsdp_param.mesh_info
        assert isinstance(info, FSDPMeshInfo)
        num_ranks, dim = info.shard_mesh_size, fsdp_param.fsdp_placement.dim
        num_elements = fsdp_param.padded_sharded_param_size.numel()
        if dim == 0:
            # Rows are cut into equal pieces but for the last ones: padding comes at the end.
            return padded_pieces(gradient, num_ranks, num_elements)
        # FSDP2 shards other dimensions only if they are even.
        pieces = gradient.new_empty((num_ranks, num_elements), dtype=torch.float32)
        sizes = gradient.shape
        cut = (*sizes[:dim], num_ranks, sizes[dim] // num_ranks, *sizes[dim + 1 :])
        by_rank = gradient.reshape(cut).movedim(dim, 0)
        pieces.view(by_rank.shape).copy_(by_rank)
        return pieces


class _Gathers:
    """Tells sources of a gathered copy that is new: replaces a method while there are any."""

    def __init__(self, fsdp_param: FSDPParam) -> None:
        self._fsdp_param_ref = weakref.ref(fsdp_param)
        self._sources: list[GatheredSource] = []

    @staticmethod
    def of(fsdp_param: FSDPParam) -> _Gathers:
        replaced = fsdp_param.__dict__.get(_REPLACED)
        gathers = getattr(replaced, "__self__", None)
        return gathers if isinstance(gathers, _Gathers) else _Gathers(fsdp_param)

    @property
    def _fsdp_param(self) -> FSDPParam:
        fsdp_param = self._fsdp_param_ref()
        assert fsdp_param is not None  # it owns what calls this
        return fsdp_param

    def add(self, source: GatheredSource) -> None:
        self._sources.append(source)
        self._fsdp_param.__dict__[_REPLACED] = self._init_unsharded_param

    def drop(self, source: GatheredSource) -> None:
        self._sources = [other for other in self._sources if other is not source]
        if not self._sources:
            self._fsdp_param.__dict__.pop(_REPLACED, None)

    def _init_unsharded_param(self) -> None:
        """FSDP2 calls it after every gather; the first time it makes the copy."""
        fsdp_param = self._fsdp_param
        type(fsdp_param).init_unsharded_param(fsdp_param)  # type: ignore[no-untyped-call]
        for source in self._sources:
            source.hook_gathered()
