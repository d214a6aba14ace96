"""How a mask acts on a parameter of FSDP2.

[Note: masking in shard space] A product ``mask * weight`` inside forward would be
kept by autograd, and FSDP could free nothing between forward and backward. So
the mask acts on the shard, just before it is all-gathered: FSDP2 asks the local
tensor for ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, a documented
extension point. The gathered weight is masked on every rank and is freed as a
dense one is; the gradient is masked on the shard after its reduce-scatter.
"""

from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from distprune.base.mask_values import write_product
from distprune.base.pruned_form import mask_key, name_without_orig, orig_key
from distprune.wrappers import masked_value
from distprune.wrappers.fsdp2 import ManagedParameter
from distprune.wrappers.masked_value import ShardMask

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

# Methods of FSDP2's record that a mask replaces.
_REPLACED = ("reset_sharded_param", "to_sharded_post_forward", "to_unsharded", "to_sharded")


class DTensorMask(ShardMask):
    """The mask of one sharded parameter at work: see [Note: masking in shard space].

    The mask is the module's buffer ``<name>_mask``, a DTensor with the parameter's mesh and
    placements, as it is at each all-gather: whatever is loaded into it or put in its place acts.

    [Note: smaller meshes] After a forward under an integer ``reshard_after_forward`` the ranks of a
    smaller mesh keep the gathered parameter, which is masked, in shards; FSDP2 gathers these for
    the backward. It refuses extensions there, and none is needed: until then they are taken off.

    [Note: swapped tensors] ``load_state_dict(assign=True)`` puts another parameter on the
    module, and ``.to()`` and ``to_empty()`` another local tensor into it, without a mask. FSDP2
    has to take notice of the new tensor as well, in ``reset_sharded_param``: that method is
    replaced, and attaches the mask to the new tensor before any forward.

    Args:
        managed: the parameter.
    """

    def __init__(self, managed: ManagedParameter) -> None:
        # The tensor refers to this object; a reference back would be a cycle through
        # C++ that the garbage collector cannot see.
        self._fsdp_param_ref = weakref.ref(managed.fsdp_param)
        self._group_ref = weakref.ref(managed.group)
        self._handle: RemovableHandle | None = None
        self._rests = False  # see [Note: smaller meshes]

    @property
    def _fsdp_param(self) -> FSDPParam:
        fsdp_param = self._fsdp_param_ref()
        assert fsdp_param is not None  # it owns what calls this
        return fsdp_param

    @property
    def _local_shard(self) -> Tensor:
        parameter: Tensor = self._fsdp_param.sharded_param
        assert isinstance(parameter, DTensor)
        return parameter._local_tensor

    @property
    def place(self) -> tuple[nn.Module, str]:
        info = self._fsdp_param._module_info
        return info.module, name_without_orig(info.param_name)

    def _mask_of(self, shard: Tensor) -> Tensor:
        mask = self.buffer
        local = mask._local_tensor if isinstance(mask, DTensor) else None
        if local is None or local.shape != shard.shape:
            module, name = self.place
            raise RuntimeError(
                f"the mask of {type(module).__name__}.{orig_key(name)} was replaced by a "
                f"{type(mask).__name__} of shape {tuple(mask.shape)}; expected a DTensor laid out "
                "like the parameter. Pass a whole mask to custom_from_mask."
            )
        return local

    def managed(self) -> ManagedParameter | None:
        fsdp_param, group = self._fsdp_param_ref(), self._group_ref()
        if fsdp_param is None or group is None:
            return None
        return ManagedParameter(fsdp_param, group)

    def attach(self) -> None:
        self._mark_tensor()
        fsdp_param = self._fsdp_param
        fsdp_param.__dict__["reset_sharded_param"] = self._reset_sharded_param
        after = fsdp_param.post_forward_mesh_info
        if after is not None and after is not fsdp_param.mesh_info:
            fsdp_param.__dict__["to_sharded_post_forward"] = self._to_sharded_post_forward
            fsdp_param.__dict__["to_unsharded"] = self._to_unsharded
            fsdp_param.__dict__["to_sharded"] = self._to_sharded

    def detach(self) -> None:
        local = self._local_shard
        if self.is_attached() and not self._rests:
            del local.__dict__["fsdp_pre_all_gather"], local.__dict__["fsdp_post_all_gather"]
        self._fsdp_param._init_extensions()
        for method in _REPLACED:
            self._fsdp_param.__dict__.pop(method, None)
        if self._handle is not None:
            self._handle.remove()

    def is_attached(self) -> bool:
        if self._rests:
            return True
        # Not, if the tensor was swapped without a call of reset_sharded_param.
        local = self._local_shard
        extension = getattr(local, "fsdp_pre_all_gather", None)
        return getattr(extension, "shard_mask", None) is self

    def _mark_tensor(self) -> None:
        parameter = self._fsdp_param.sharded_param
        local = self._local_shard
        local.__dict__["fsdp_pre_all_gather"] = _PreAllGather(self)
        local.__dict__["fsdp_post_all_gather"] = _post_all_gather
        # FSDP2 searches for extensions at construction only.
        self._fsdp_param._init_extensions()
        if self._handle is not None:
            self._handle.remove()
        # A frozen parameter refuses hooks, but it may be unfrozen later.
        requires_grad = parameter.requires_grad
        parameter.requires_grad_(True)
        self._handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            self._mask_gradient
        )
        parameter.requires_grad_(requires_grad)

    def _reset_sharded_param(self) -> None:
        """Replaces the method of FSDP2's record; see [Note: swapped tensors]."""
        fsdp_param = self._fsdp_param
        type(fsdp_param).reset_sharded_param(fsdp_param)  # type: ignore[no-untyped-call]
        if not self.is_attached():
            self._mark_tensor()

    def _to_sharded_post_forward(self) -> None:
        fsdp_param = self._fsdp_param
        type(fsdp_param).to_sharded_post_forward(fsdp_param)
        if self.is_attached():
            local = self._local_shard
            self._rests = True
            del local.__dict__["fsdp_pre_all_gather"], local.__dict__["fsdp_post_all_gather"]

    def _to_unsharded(self) -> None:
        type(self._fsdp_param).to_unsharded(self._fsdp_param)
        self._end_rest()

    def _to_sharded(self) -> None:
        type(self._fsdp_param).to_sharded(self._fsdp_param)
        self._end_rest()

    def _end_rest(self) -> None:
        if self._rests:
            self._rests = False
            self._mark_tensor()

    def value(self, module: nn.Module, name: str) -> Tensor:
        original = module._parameters[orig_key(name)]
        mask = module._buffers[mask_key(name)]
        assert original is not None and mask is not None
        if _is_gathered_copy(original, mask):
            return original
        return masked_value.product(module, name, original, mask)

    def masked_shard(self, param_dtype: torch.dtype | None) -> Tensor:
        """What to gather: the masked shard, padded with zero rows to the size of every rank's.

        Args:
            param_dtype: of the gathered parameter, if it is a float; None for the shard's own.
        """
        local = self._local_shard
        if param_dtype is None or not local.is_floating_point():
            param_dtype = local.dtype
        padded = local.new_empty(self._fsdp_param.padded_sharded_param_size, dtype=param_dtype)
        num_rows = local.size(0)
        if num_rows == padded.size(0):
            write_product(local, self._mask_of(local), out=padded)
            return padded
        write_product(local, self._mask_of(local), out=padded[:num_rows])
        padded[num_rows:].zero_()
        return padded

    def _mask_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None and not self.has_dense_gradient:
            assert isinstance(parameter.grad, DTensor)
            gradient = parameter.grad._local_tensor
            write_product(gradient, self._mask_of(self._local_shard), out=gradient)


class _PreAllGather:
    """A shard's ``fsdp_pre_all_gather``.

    An object, because FSDP2 inspects the signature at every all-gather, which for a method takes
    several times as long as masking a small shard.
    """

    __signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("mesh", "outer_size", "outer_stride", "module", "mp_policy")
        ]
    )

    def __init__(self, shard_mask: DTensorMask) -> None:
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


def _is_gathered_copy(registered: Tensor, mask: Tensor) -> bool:
    """Whether a registered parameter is the gathered one: that one is masked already."""
    if not isinstance(registered, DTensor):
        return True
    assert isinstance(mask, DTensor)
    return registered.device_mesh != mask.device_mesh or registered.placements != mask.placements
