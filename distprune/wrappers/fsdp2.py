"""FSDP2 (``fully_shard``, ``replicate``): its record of a parameter; its private fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, _composable_state
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DDPMeshInfo,
    FSDPMeshInfo,
    TrainingState,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from distprune.wrappers import managed

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


@dataclass(frozen=True)
class FSDP2Parameter(managed.Managed):
    """One parameter that FSDP2 shards.

    Attributes:
        fsdp_param: FSDP2's own record of it.
        group: the parameters that are gathered together with it.
    """

    fsdp_param: FSDPParam
    group: FSDPParamGroup
    tells_gathers: ClassVar[bool] = True

    @property
    def parameter(self) -> DTensor:  # type: ignore[override]
        """The sharded parameter, whatever is registered on the module at the moment.

        A plain tensor if ``load_state_dict(assign=True)`` put one in its place.
        """
        return self.fsdp_param.sharded_param  # type: ignore[return-value]

    @property
    def shape(self) -> torch.Size:
        return self.fsdp_param.sharded_param.shape

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        return _owners(self.fsdp_param)

    @property
    def stored(self) -> Sequence[Tensor]:
        return [self.parameter._local_tensor]

    @property
    def shard_group(self) -> ProcessGroup | None:
        """The ranks that each have a part; None if this rank has all."""
        info = self.fsdp_param.mesh_info
        is_cut = isinstance(info, FSDPMeshInfo) and info.shard_mesh_size > 1
        return info.shard_process_group if is_cut else None

    @property
    def groups(self) -> Sequence[ProcessGroup]:
        info, shards = self.fsdp_param.mesh_info, self.shard_group
        # HSDP, or torch's composable replicate()
        replicas = [info.replicate_process_group] if isinstance(info, DDPMeshInfo) else []
        return replicas if shards is None else [shards, *replicas]

    def has_registered(self, module: nn.Module, name: str) -> bool:
        registered = module._parameters.get(name)
        fields = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
        own = [getattr(self.fsdp_param, field, None) for field in fields]
        return registered is not None and any(registered is each for each in own)

    def free_gathered(self) -> None:
        # After evaluation the root keeps its gathered copy. A prefetch before a forward that ended
        # early, or unshard(async_op=True), leaves a gather in flight, of a group that still counts
        # as sharded; the next forward would use its result, so wait for it and free it as well.
        self.group.wait_for_unshard()
        if self.fsdp_param.sharded_state != ShardedState.SHARDED:
            # Not reshard(): a forward that raised left the group in its forward state, where
            # that does nothing for a root.
            self.group._to_sharded()  # type: ignore[no-untyped-call]

    def hold(self, held: Any) -> None:
        managed.replace_methods(self.group, id(self.fsdp_param), held, unshard=_unshard)

    def release(self, held: Any) -> None:
        managed.restore_methods(self.group, id(self.fsdp_param), held, "unshard")

    @property
    def gradient(self) -> Tensor | None:
        gradient = self.parameter.grad
        return gradient._local_tensor if isinstance(gradient, DTensor) else None

    @property
    def has_unreduced_gradient(self) -> bool:
        gathered = getattr(self.fsdp_param, "_unsharded_param", None)
        return (
            self.fsdp_param.unsharded_accumulated_grad is not None
            or (gathered is not None and gathered.grad is not None)
            or self.group._partial_reduce_output is not None  # HSDP without its all-reduce
        )

    def gradient_source(self) -> managed.GradientSource:
        return GatheredSource(self)


def _unshard(group: FSDPParamGroup, async_op: bool = False) -> None:
    """Set the pruned elements of a group to zero, then gather it: FSDP2 calls it as its own.

    Not before a backward, which gathers what its forward gathered.
    """
    state, info = group._training_state, group.mesh_info
    if state != TrainingState.PRE_BACKWARD and not group.is_unsharded:
        # In the stream that reads the shards, which has waited for the optimizer.
        stream = group.device_handle.current_stream()
        if isinstance(info, FSDPMeshInfo) and info.shard_mesh_size > 1:
            stream, _ = group.comm_ctx.get_all_gather_streams(async_op, state)
        with group.device_handle.stream(stream):
            for held in managed.users_of(group).values():
                held.zero()
    type(group).unshard(group, async_op)  # type: ignore[no-untyped-call]


def managed_parameters() -> dict[tuple[int, str], FSDP2Parameter]:
    """Every parameter that FSDP2 shards in this process, by (id(module), name)."""
    records: dict[tuple[int, str], FSDP2Parameter] = {}
    for group in _groups():
        for fsdp_param in group.fsdp_params:
            if not group._reset_sharded_params:
                _notice_loaded(fsdp_param)
            record = FSDP2Parameter(fsdp_param, group)
            records |= {(id(module), name): record for module, name in _owners(fsdp_param)}
    return records


def _notice_loaded(fsdp_param: FSDPParam) -> None:
    """Let FSDP2 take notice of a loaded parameter, as its first forward does.

    A loader that fills a model after ``fully_shard``, as ``from_pretrained`` of transformers does,
    leaves FSDP2's record with tensors on the meta device.
    """
    info, known = fsdp_param._module_info, fsdp_param.sharded_param
    loaded = info.module._parameters.get(info.param_name) if known.is_meta else known
    if loaded is not known and isinstance(loaded, DTensor) and loaded.shape == known.shape:
        with torch.no_grad():
            fsdp_param.reset_sharded_param()


def _owners(fsdp_param: FSDPParam) -> list[tuple[nn.Module, str]]:
    info = fsdp_param._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def _groups() -> Iterator[FSDPParamGroup]:
    seen: set[int] = set()
    states = _composable_state._module_state_mapping
    for reference in list(states.values()) if states else ():  # asking takes less than walking
        state = reference()
        if isinstance(state, FSDPState) and id(state) not in seen:
            seen.add(id(state))
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # torch < 2.12 has at most one
                groups = [state._fsdp_param_group] if state._fsdp_param_group else []
            yield from groups


class GatheredSource(managed.GradientSource):
    """The gathered copy of one parameter: see managed.[Note: hooks on leaves].

    FSDP2 makes the copy at the first gather and keeps the object.

    Args:
        record: of the parameter.
    """

    def __init__(self, record: FSDP2Parameter) -> None:
        self._fsdp_param, shards = record.fsdp_param, record.shard_group
        # Under TP: this rank's part, after the sum that sequence parallelism leaves open.
        own_part: Callable[[Tensor], Tensor] = self._fsdp_param._get_grad_inner_tensor
        replicas = record.groups[shards is not None :]
        super().__init__(None, shards, replicas, own_part, self._pieces)
        self._receive: Callable[[Tensor], None] | None = None

    def attach(self, receive: Callable[[Tensor], None]) -> None:
        self._receive = receive
        self.hook_gathered()
        functions = {"init_unsharded_param": _init_unsharded_param}
        managed.replace_methods(self._fsdp_param, id(self), self, **functions)

    def detach(self) -> None:
        managed.restore_methods(self._fsdp_param, id(self), self, "init_unsharded_param")
        super().detach()
        self._receive = self.leaf = None

    def hook_gathered(self) -> None:
        """Put the hook on the gathered copy, if there is one and the hook is not there yet."""
        gathered: Tensor | None = getattr(self._fsdp_param, "_unsharded_param", None)
        if gathered is not None and self.leaf is not gathered:
            assert self._receive is not None  # it is attached
            # FSDP2 gives the copy the parameter's requires_grad only when it registers it.
            requires_grad = gathered.requires_grad
            self.leaf = gathered.requires_grad_(True)
            super().attach(self._receive)
            gathered.requires_grad_(requires_grad)

    def _pieces(self, gradient: Tensor) -> Tensor:
        info, dim = self._fsdp_param.mesh_info, self._fsdp_param.fsdp_placement.dim
        assert isinstance(info, FSDPMeshInfo)
        num_ranks = info.shard_mesh_size
        num_elements = self._fsdp_param.padded_sharded_param_size.numel()
        if dim:  # FSDP2 shards other dimensions only if they are even
            gradient = torch.unflatten(gradient, dim, (num_ranks, -1)).movedim(dim, 0)
        # Rows are cut into equal pieces but for the last ones: padding comes at the end.
        return managed.padded_pieces(gradient, num_ranks, num_elements)


def _init_unsharded_param(fsdp_param: FSDPParam) -> None:
    """FSDP2 calls it after every gather; the first time it makes the copy."""
    type(fsdp_param).init_unsharded_param(fsdp_param)  # type: ignore[no-untyped-call]
    for source in managed.users_of(fsdp_param).values():
        source.hook_gathered()
