"""Un-averaged gradients under FSDP2; like fsdp2, this file knows its private fields."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.utils.hooks import RemovableHandle

from distprune.torch_private.fsdp2 import ManagedParameter
from distprune.torch_private.gradient_source import GradientSource, Receive

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

_REPLACED = "init_unsharded_param"


class GatheredSource(GradientSource):
    """The gathered copy of one parameter: see gradient_source.[Note: hooks on leaves].

    FSDP2 makes the copy at the first gather and keeps the object.

    Args:
        managed: the parameter.
    """

    def __init__(self, managed: ManagedParameter) -> None:
        self._fsdp_param: FSDPParam = managed.fsdp_param
        self._receive: Receive | None = None
        self._hooked: weakref.ref[Tensor] | None = None
        self._handle: RemovableHandle | None = None
        info = self._fsdp_param.mesh_info
        assert isinstance(info, FSDPMeshInfo)  # ManagedParameter.unsupported says so otherwise
        if info.shard_mesh_size > 1:
            self.shard_group = info.shard_process_group
        if isinstance(info, DDPMeshInfo):  # HSDP
            self.replica_groups = (info.replicate_process_group,)

    def attach(self, receive: Receive) -> None:
        self._receive = receive
        self.hook_gathered()
        _Gathers.of(self._fsdp_param).add(self)

    def detach(self) -> None:
        self._receive = None
        _Gathers.of(self._fsdp_param).drop(self)
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._hooked = None

    def hook_gathered(self) -> None:
        """Put the hook on the gathered copy, if there is one and the hook is not there yet."""
        gathered: Tensor | None = getattr(self._fsdp_param, "_unsharded_param", None)
        if gathered is None or (self._hooked is not None and self._hooked() is gathered):
            return
        # FSDP2 gives the copy the parameter's requires_grad only when it registers it.
        requires_grad = gathered.requires_grad
        gathered.requires_grad_(True)
        self._handle = gathered.register_hook(self._hook)  # type: ignore[no-untyped-call]
        gathered.requires_grad_(requires_grad)
        self._hooked = weakref.ref(gathered)

    def _hook(self, gradient: Tensor) -> None:
        if self._receive is not None:
            with torch.no_grad():
                # Under TP: this rank's part, after the sum that sequence parallelism leaves open.
                self._receive(self._fsdp_param._get_grad_inner_tensor(gradient))

    def pieces(self, gradient: Tensor) -> Tensor:
        fsdp_param, info = self._fsdp_param, self._fsdp_param.mesh_info
        assert isinstance(info, FSDPMeshInfo)
        num_ranks, dim = info.shard_mesh_size, fsdp_param.fsdp_placement.dim
        shape = (num_ranks, fsdp_param.padded_sharded_param_size.numel())
        pieces = gradient.new_empty(shape, dtype=torch.float32)
        if dim == 0:
            # Rows are cut into equal pieces but for the last ones: padding comes at the end.
            flat = pieces.view(-1)
            flat[: gradient.numel()].view(gradient.shape).copy_(gradient)
            flat[gradient.numel() :].zero_()
        else:  # FSDP2 shards other dimensions only if they are even
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
