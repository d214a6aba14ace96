"""FSDP2 (``fully_shard``): the only file that knows its private fields.

[Note: masking in shard space] A product ``mask * weight`` inside forward would be
kept by autograd, and FSDP could free nothing between forward and backward. So
the mask acts on the shard, just before it is all-gathered: FSDP2 asks the local
tensor for ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, a documented
extension point. The gathered weight is masked on every rank and is freed as a
dense one is; the gradient is masked on the shard after its reduce-scatter.

:meth:`ManagedParameter.check_fields` says which private field a new torch version broke.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from distprune._common.lost import lost_mask
from distprune._common.product import write_product
from distprune._common.pruned_form import mask_key, masked_product, name_without_orig, orig_key
from distprune.torch_private import live_graphs, private_fields
from distprune.torch_private.errors import backward_to_come


@dataclass(frozen=True)
class ManagedParameter:
    """One parameter that FSDP2 shards, and the group that gathers it; a wrapper.Managed."""

    fsdp_param: Any
    group: Any

    @property
    def sharded(self) -> nn.Parameter:
        """The sharded parameter, whatever is registered on the module at the moment."""
        return self.fsdp_param.sharded_param

    @property
    def key(self) -> Hashable:
        """The same for every name of a tied parameter."""
        return id(self.sharded)

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return self.sharded.shape

    @property
    def persists_mask(self) -> bool:
        """Yes: a mask is a DTensor like the parameter, and travels like it."""
        return True

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        """Every (module, name) under which FSDP2 registers the parameter."""
        info = self.fsdp_param._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        return [(info.module, info.param_name), *shared]

    @property
    def unsupported(self) -> str | None:
        """Why a mask cannot act on this parameter; None if it can."""
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

    def reshard(self) -> None:
        """Free the gathered copy if there is one: after evaluation the root keeps its own.

        A prefetch before a forward that ended early, or ``unshard(async_op=True)``, leaves a
        gather in flight, of a group that still counts as sharded. The next forward would use
        what it brings, so it is waited for, and freed as well.

        Raises:
            RuntimeError: a backward is still to come that would gather it again.
        """
        self._check_no_backward()
        self.group.wait_for_unshard()
        if self.fsdp_param.sharded_state != ShardedState.SHARDED:
            # Not reshard(): a forward that raised left the group in its forward state, where
            # that does nothing for a root.
            self.group._to_sharded()

    def _check_no_backward(self) -> None:
        # Graphs hold the gathered parameter, which is there from the first gather on; its memory
        # comes and goes.
        gathered = getattr(self.fsdp_param, "_unsharded_param", None)
        if gathered is not None and live_graphs.reaches(gathered):
            raise backward_to_come(*self.owners[0])

    def has_registered(self, module: nn.Module, name: str) -> bool:
        """Whether what a module has under a name is this parameter, or a copy that FSDP2 made."""
        registered = module._parameters.get(name)
        copies = ("_unsharded_param", "_sharded_post_forward_param")
        is_copy = self.fsdp_param.sharded_state != ShardedState.SHARDED and any(
            registered is getattr(self.fsdp_param, each, None) for each in copies
        )
        return registered is not None and (registered is self.sharded or is_copy)

    def rename(self, old: str, new: str) -> None:
        """Tell FSDP2 that what it registers as ``old`` is to be registered as ``new``.

        The modules themselves are the caller's to change.
        """
        info = self.fsdp_param._module_info
        info.shared_param_names = [new if name == old else name for name in info.shared_param_names]
        if info.param_name == old:
            info.param_name = new

    def write(self, values: Tensor) -> None:
        """Overwrite this rank's shard, which no gather may be reading."""
        self.reshard()
        self.sharded.to_local().copy_(values)

    def masked_by(self, mask: Tensor) -> ShardMask:
        """What lets a mask, a DTensor laid out like the parameter, act on it."""
        assert isinstance(mask, DTensor)
        return ShardMask(self)

    def check_fields(self) -> None:
        """Raise NotImplementedError naming the private fields that this torch lacks."""
        info = getattr(self.fsdp_param, "_module_info", None)
        objects = {"FSDPParam": self.fsdp_param, "FSDPParamGroup": self.group}
        private_fields.check("FSDP2", objects | {"ParamModuleInfo": info})


class ShardMask:
    """The mask of one sharded parameter at work: see [Note: masking in shard space].

    The mask is the module's buffer ``<name>_mask``, a DTensor with the parameter's mesh and
    placements, as it is at each all-gather: whatever is loaded into it or put in its place acts.

    [Note: swapped tensors] ``load_state_dict(assign=True)`` puts another parameter on the
    module, and ``.to()`` and ``to_empty()`` another local tensor into it, which know nothing
    of a mask. FSDP2 then has to look at the tensor again too, in ``reset_sharded_param``: that
    is where the mask is put on the new one, before any forward.

    Args:
        managed: the parameter.
    """

    def __init__(self, managed: ManagedParameter) -> None:
        # The tensor refers to this object; a reference back would be a cycle through
        # C++ that the garbage collector cannot see.
        self._fsdp_param_ref = weakref.ref(managed.fsdp_param)
        self._group_ref = weakref.ref(managed.group)
        self._handle: RemovableHandle | None = None

    @property
    def _fsdp_param(self) -> Any:
        return self._fsdp_param_ref()

    @property
    def _mask(self) -> Tensor:
        info = self._fsdp_param._module_info
        name = name_without_orig(info.param_name)
        mask = info.module._buffers.get(mask_key(name))
        if mask is None:
            raise lost_mask(info.module, name)
        local = mask._local_tensor if isinstance(mask, DTensor) else None
        expected = self._fsdp_param.sharded_param._local_tensor.shape
        if local is None or local.shape != expected:
            raise RuntimeError(
                f"the mask of {type(info.module).__name__}.{info.param_name} was replaced by a "
                f"{type(mask).__name__} of shape {tuple(mask.shape)}; expected a DTensor laid out "
                "like the parameter. Pass a whole mask to custom_from_mask."
            )
        return local

    def managed(self) -> ManagedParameter | None:
        """FSDP2's record of the parameter; None if it is gone."""
        fsdp_param, group = self._fsdp_param_ref(), self._group_ref()
        if fsdp_param is None or group is None:
            return None
        return ManagedParameter(fsdp_param, group)

    def attach(self) -> None:
        """Let the next all-gather, and the gradient hook, see the mask."""
        self._mark_tensor()
        self._fsdp_param.reset_sharded_param = self._reset_sharded_param

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        local = self._fsdp_param.sharded_param._local_tensor
        if self.is_attached():
            del local.fsdp_pre_all_gather, local.fsdp_post_all_gather
        self._fsdp_param._init_extensions()
        self._fsdp_param.__dict__.pop("reset_sharded_param", None)
        if self._handle is not None:
            self._handle.remove()

    def is_attached(self) -> bool:
        """False if the tensor was swapped behind the back of FSDP2."""
        local = self._fsdp_param.sharded_param._local_tensor
        extension = getattr(local, "fsdp_pre_all_gather", None)
        return getattr(extension, "shard_mask", None) is self

    def _mark_tensor(self) -> None:
        parameter = self._fsdp_param.sharded_param
        local = parameter._local_tensor
        local.fsdp_pre_all_gather = _PreAllGather(self)
        local.fsdp_post_all_gather = _post_all_gather
        # FSDP2 looks for extensions at construction only.
        self._fsdp_param._init_extensions()
        if self._handle is not None:
            self._handle.remove()
        # A frozen parameter refuses hooks, but it may be unfrozen later.
        requires_grad = parameter.requires_grad
        parameter.requires_grad_(True)
        self._handle = parameter.register_post_accumulate_grad_hook(self._mask_gradient)
        parameter.requires_grad_(requires_grad)

    def _reset_sharded_param(self) -> None:
        """Stands in for the method of FSDP2's record; see [Note: swapped tensors]."""
        fsdp_param = self._fsdp_param
        type(fsdp_param).reset_sharded_param(fsdp_param)
        if not self.is_attached():
            self._mark_tensor()

    def value(self, module: nn.Module, name: str) -> Tensor:
        """``module.<name>`` as the mask leaves it, in whatever state FSDP2 has it."""
        original = module._parameters[orig_key(name)]
        mask = module._buffers[mask_key(name)]
        assert original is not None and mask is not None
        if _is_gathered_copy(original, mask):
            return original
        return masked_product(original, mask)

    def masked_shard(self, param_dtype: torch.dtype | None) -> Tensor:
        """What to gather: the masked shard, padded with zero rows to the size of every rank's.

        Args:
            param_dtype: of the gathered parameter, if it is a float; None for the shard's own.
        """
        local = self._fsdp_param.sharded_param._local_tensor
        if param_dtype is None or not local.is_floating_point():
            param_dtype = local.dtype
        padded = local.new_empty(self._fsdp_param.padded_sharded_param_size, dtype=param_dtype)
        num_rows = local.size(0)
        write_product(local, self._mask, out=padded[:num_rows])
        padded[num_rows:].zero_()
        return padded

    def _mask_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradient = parameter.grad._local_tensor
            write_product(gradient, self._mask, out=gradient)


class _PreAllGather:
    """A shard's ``fsdp_pre_all_gather``.

    An object, because FSDP2 looks at its signature at every all-gather: that of a method takes
    inspect several times as long as masking a small shard.
    """

    __signature__ = inspect.Signature(
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in ("mesh", "outer_size", "outer_stride", "module", "mp_policy")
    )

    def __init__(self, shard_mask: ShardMask) -> None:
        self.shard_mask = shard_mask

    def __call__(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], None]:
        return (self.shard_mask.masked_shard(mp_policy.param_dtype),), None


def _post_all_gather(
    all_gather_outputs: tuple[Tensor, ...],
    metadata: Any,
    param_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """A shard's ``fsdp_post_all_gather``."""
    if out is not None:
        return None  # ``out`` is a view of the gathered buffer
    # No inner tensors: FSDP2 frees the buffer as it frees a dense one.
    return all_gather_outputs[0], ()


def managed_parameters() -> dict[tuple[int, str], ManagedParameter]:
    """Every parameter that FSDP2 shards in this process, by (id(module), name).

    A leaf does not know the module that gathers it, and the parameter registered
    on it may be the gathered copy, so its type tells nothing.
    """
    found: dict[tuple[int, str], ManagedParameter] = {}
    for group in _groups():
        for fsdp_param in group.fsdp_params:
            managed = ManagedParameter(fsdp_param, group)
            info = fsdp_param._module_info
            found[id(info.module), info.param_name] = managed
            if info.shared_modules:
                found |= {(id(module), name): managed for module, name in managed.owners}
    return found


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


def _is_gathered_copy(registered: Tensor, mask: Tensor) -> bool:
    """Whether a registered parameter is the gathered one: that one is masked already."""
    if not isinstance(registered, DTensor):
        return True
    assert isinstance(mask, DTensor)
    return registered.device_mesh != mask.device_mesh or registered.placements != mask.placements


def subclass_attributes(cls: type) -> dict[str, Any]:
    """Class attributes that keep a subclass of an FSDPModule class working."""
    # FSDPModule.__new__ finds the user's class by its place in the MRO.
    if issubclass(cls, FSDPModule) and hasattr(cls, "_orig_cls_mro_index"):
        return {"_orig_cls_mro_index": cls._orig_cls_mro_index + 1}
    return {}


def _groups() -> Iterator[Any]:
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
