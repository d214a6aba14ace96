"""FSDP2 (``fully_shard``): its record of a parameter, in its private fields.

How a mask acts on it: fsdp2_mask. :meth:`ManagedParameter.check_fields` names a private field that
a new torch version lacks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from distprune.torch_private import live_graphs, private_fields
from distprune.torch_private.managed import ManagedDTensor

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
    def persists_mask(self) -> bool:
        return True  # a mask is a DTensor like the parameter, and is saved and loaded like it

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        info = self.fsdp_param._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        return [(info.module, info.param_name), *shared]

    @property
    def unsupported(self) -> str | None:
        if not isinstance(self.fsdp_param.mesh_info, FSDPMeshInfo):
            return "it is replicated by torch's composable replicate(); wrap the model in DDP"
        after = self.fsdp_param.post_forward_mesh_info
        if after is not None and after is not self.fsdp_param.mesh_info:
            return (
                "it is resharded to a smaller mesh after forward (an integer "
                "reshard_after_forward), where FSDP2 supports no all-gather extension; pass "
                "reshard_after_forward=True or False to fully_shard"
            )
        if self.fsdp_param.offload_to_cpu and self.fsdp_param.device.type != "cpu":
            return (
                "its shards are offloaded to the CPU (CPUOffloadPolicy), from where FSDP2 "
                "copies them without their all-gather extension; use no offload policy"
            )
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

    def is_in_graph(self) -> bool:
        # Graphs refer to the gathered parameter, which exists from the first gather on; its memory
        # is freed and allocated again.
        gathered = getattr(self.fsdp_param, "_unsharded_param", None)
        return gathered is not None and live_graphs.reaches(gathered)

    def has_registered(self, module: nn.Module, name: str) -> bool:
        registered = module._parameters.get(name)
        copies = ("_unsharded_param", "_sharded_post_forward_param")
        is_copy = self.fsdp_param.sharded_state != ShardedState.SHARDED and any(
            registered is getattr(self.fsdp_param, field, None) for field in copies
        )
        is_shard = registered is self.fsdp_param.sharded_param
        return registered is not None and (is_shard or is_copy)

    def rename(self, old: str, new: str) -> None:
        info = self.fsdp_param._module_info
        info.shared_param_names = [new if name == old else name for name in info.shared_param_names]
        if info.param_name == old:
            info.param_name = new

    @property
    def gathers_in_other_dtype(self) -> bool:
        return self.fsdp_param.mp_policy.param_dtype not in (None, self.sharded.dtype)

    @property
    def optimizer_tensor(self) -> tuple[Tensor, slice | None]:
        return self.sharded, None

    @property
    def requires_grad(self) -> bool:
        return self.sharded.requires_grad

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
        self.reshard()  # no gather may be reading the shard
        self.sharded.to_local().copy_(values)

    def check_fields(self) -> None:
        info = getattr(self.fsdp_param, "_module_info", None)
        objects = {"FSDPParam": self.fsdp_param, "FSDPParamGroup": self.group}
        private_fields.check("FSDP2", objects | {"ParamModuleInfo": info})


def managed_parameters() -> dict[tuple[int, str], ManagedParameter]:
    """Every parameter that FSDP2 shards in this process, by (id(module), name)."""
    records: dict[tuple[int, str], ManagedParameter] = {}
    for group in _groups():
        for fsdp_param in group.fsdp_params:
            managed = ManagedParameter(fsdp_param, group)
            info = fsdp_param._module_info
            records[id(info.module), info.param_name] = managed
            if info.shared_modules:
                records |= {(id(module), name): managed for module, name in managed.owners}
    return records


def is_managed(module: nn.Module, name: str) -> bool:
    """Whether FSDP2 shards what it registers on a module under a name."""
    for group in _groups():
        for fsdp_param in group.fsdp_params:
            info = fsdp_param._module_info
            if info.module is module and info.param_name == name:
                return True
            if info.shared_modules:
                shared = zip(info.shared_modules, info.shared_param_names, strict=True)
                if any(owner is module and n == name for owner, n in shared):
                    return True
    return False


def subclass_attributes(cls: type) -> dict[str, Any]:
    """Class attributes that keep a subclass of an FSDPModule class working."""
    # FSDPModule.__new__ finds the user's class by its place in the MRO.
    if issubclass(cls, FSDPModule) and hasattr(cls, "_orig_cls_mro_index"):
        return {"_orig_cls_mro_index": cls._orig_cls_mro_index + 1}
    return {}


def plain_class(cls: type) -> type:
    """The class of which ``fully_shard`` made a subclass; the class itself if it made none."""
    return next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))


def _groups() -> Iterator[FSDPParamGroup]:
    seen: set[int] = set()
    for reference in list(_composable_state._module_state_mapping.values()):
        state = reference()
        if not isinstance(state, FSDPState) or id(state) in seen:
            continue
        seen.add(id(state))
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch < 2.12 has at most one
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        yield from groups
