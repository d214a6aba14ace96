"""How a mask acts under FSDP1, and masks in its state dicts; this file knows its private fields.

[Note: masks on a flat parameter] FSDP1 joins the parameters of a wrapped module into one
flat parameter and gives each rank an even slice of it, so a rank has a *run* of a
parameter's elements, in the order of its memory. The mask is multiplied into a copy of the
slice just before the flat parameter is all-gathered, and into the sharded gradient before
the optimizer sees it: three methods of the handle are replaced while it has masks. Inside
``summon_full_params`` and ``state_dict`` the flat parameter is gathered as it is, because
FSDP1 may write back what it gathers there.

The local run of a mask is a non-persistent buffer; hooks put masks into state dicts.

State dicts get the whole mask, or a shard of it laid out like the parameter's, from hooks of the
module that owns the parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import _shard_utils as shard_utils
from torch.distributed.tensor import DTensor

from distprune.base import mask_bits
from distprune.base.mask_values import write_product
from distprune.base.pruned_form import orig_key
from distprune.ranks.process_groups import over_groups
from distprune.wrappers import masked_value
from distprune.wrappers.fsdp1 import FlatPiece, is_summoned, local_slice
from distprune.wrappers.masked_value import RunMask

if TYPE_CHECKING:
    from torch.distributed.fsdp._flat_param import FlatParamHandle


_REPLACED = ("needs_unshard", "_all_gather_flat_param", "prepare_gradient_for_optim")
_PIECES = "_distprune_masked_pieces"


class FlatMask(RunMask):
    """The mask of one parameter at work: see [Note: masks on a flat parameter].

    Args:
        piece: the parameter.
    """

    # With CPU offload FSDP1 moves buffers to the accelerator for good, and parameters for use.
    may_be_elsewhere = True

    def __init__(self, piece: FlatPiece) -> None:
        super().__init__()
        self._piece = piece

    def managed(self) -> FlatPiece:
        return self._piece

    def attach(self) -> None:
        _MaskedPieces.of(self._piece.handle).add(self._piece.number, self)
        super().attach()

    def detach(self) -> None:
        _MaskedPieces.of(self._piece.handle).drop(self._piece.number, self)
        super().detach()

    def is_attached(self) -> bool:
        return _MaskedPieces.of(self._piece.handle).masks.get(self._piece.number) is self

    def value(self, module: nn.Module, name: str) -> Tensor:
        """The gathered parameter inside forward, otherwise this rank's run.

        Raises:
            RuntimeError: inside ``summon_full_params``, which gathers without the mask.
        """
        key = orig_key(name)
        original: Tensor = getattr(module, key)
        if is_summoned(self._piece.handle):
            raise RuntimeError(
                f"{type(module).__name__}.{name} was read inside summon_full_params, where FSDP1 "
                f"gathers {key} without its mask. Run the model outside of that context, "
                "or remove() the pruning first."
            )
        if isinstance(original, nn.Parameter):  # use_orig_params=True, outside of forward
            return masked_value.product(module, name, original, self.buffer.to(original.device))
        return original

    def saved(self) -> Any:
        """The mask in the form that FSDP1 was told to use in state dicts."""
        wrapper, config = self._piece.wrapper, self._piece.wrapper._state_dict_config
        if wrapper._state_dict_type == StateDictType.LOCAL_STATE_DICT:
            return self.buffer
        whole = whole_mask(self._piece, self.buffer)
        part: Tensor | ShardedTensor
        if wrapper._state_dict_type == StateDictType.FULL_STATE_DICT:
            if isinstance(config, FullStateDictConfig) and config.rank0_only and wrapper.rank:
                return None
            part = whole
        elif wrapper._device_mesh is not None and getattr(config, "_use_dtensor", False):
            part = shard_utils._create_chunk_dtensor(whole, wrapper.rank, wrapper._device_mesh)
        else:
            assert wrapper.process_group is not None
            part = shard_utils._create_chunk_sharded_tensor(
                whole,
                wrapper.rank,
                wrapper.world_size,
                wrapper._device_handle.device_count(),
                wrapper.process_group,
            )
        return part.cpu() if config.offload_to_cpu else part

    def load(self, value: Any) -> str:
        piece, num_elements = self._piece, self.buffer.numel()
        is_local = piece.wrapper._state_dict_type == StateDictType.LOCAL_STATE_DICT
        expected = torch.Size((num_elements,)) if is_local else piece.shape
        if torch.Size(value.size()) != expected:
            return (
                f"this rank's {num_elements} elements of the mask, as LOCAL_STATE_DICT has them of "
                "a model that is sharded in the same way"
                if is_local
                else f"the mask of a parameter of shape {tuple(expected)}"
            )
        if not is_local:
            whole = value if type(value) is Tensor else _whole_of(value, piece)
            value = _run_of(whole, piece, num_elements)
        self.buffer.copy_(value != 0)
        if not is_summoned(piece.handle):
            piece.free_gathered()
        return ""


class _MaskedPieces:
    """The masks on one handle. They replace three of its methods while there are any."""

    def __init__(self, handle: FlatParamHandle) -> None:
        self._handle_ref = weakref.ref(handle)
        self._gathered_raw = False
        self.masks: dict[int, FlatMask] = {}

    @staticmethod
    def of(handle: FlatParamHandle) -> _MaskedPieces:
        pieces: _MaskedPieces | None = handle.__dict__.get(_PIECES)
        if pieces is None:
            pieces = handle.__dict__[_PIECES] = _MaskedPieces(handle)
        return pieces

    @property
    def _handle(self) -> FlatParamHandle:
        handle = self._handle_ref()
        assert handle is not None  # it owns this object
        return handle

    def add(self, number: int, mask: FlatMask) -> None:
        self.masks[number] = mask
        self._handle.__dict__.update(
            needs_unshard=self._needs_unshard,
            _all_gather_flat_param=self._all_gather_flat_param,
            prepare_gradient_for_optim=self._prepare_gradient_for_optim,
        )

    def drop(self, number: int, mask: FlatMask) -> None:
        if self.masks.get(number) is mask:
            del self.masks[number]
        if not self.masks:
            for name in (*_REPLACED, _PIECES):
                self._handle.__dict__.pop(name, None)

    # The methods below are called by FSDP1 as it calls its own.

    def _needs_unshard(self) -> bool:
        handle = self._handle
        needed = type(handle).needs_unshard(handle)
        if not needed and self._gathered_raw != is_summoned(handle):
            # After evaluation the root's gathered copy stays: masked, and not for a state dict.
            handle._free_unsharded_flat_param()  # type: ignore[no-untyped-call]
            return True
        return needed

    def _all_gather_flat_param(self, padded_unsharded_flat_param: Tensor) -> Tensor:
        handle = self._handle
        gather = type(handle)._all_gather_flat_param
        self._gathered_raw = is_summoned(handle)
        if self._gathered_raw:
            return gather(handle, padded_unsharded_flat_param)
        flat_param = handle.flat_param
        dense = flat_param.data
        with torch.inference_mode(False), torch.no_grad():
            masked = masked_slice(dense, local_slice(handle), self._spans())
        flat_param.data = masked
        try:
            return gather(handle, padded_unsharded_flat_param)
        finally:
            flat_param.data = dense

    def _prepare_gradient_for_optim(self) -> None:
        handle = self._handle
        for name in ("_saved_grad_shard", "_cpu_grad"):
            gradient = getattr(handle.flat_param, name, None)
            if gradient is not None:
                for span, mask in self._spans(with_dense_gradients=False):
                    run = gradient[span]
                    write_product(run, mask.to(gradient.device), out=run)
        type(handle).prepare_gradient_for_optim(handle)  # type: ignore[no-untyped-call]

    def _spans(self, with_dense_gradients: bool = True) -> Iterator[tuple[slice, Tensor]]:
        for mask in self.masks.values():
            offset, size = mask._piece.span
            if size and (with_dense_gradients or not mask.has_dense_gradient):
                yield slice(offset, offset + size), mask.buffer


def masked_slice(dense: Tensor, source: Tensor, spans: Iterable[tuple[slice, Tensor]]) -> Tensor:
    """The masked slice of a flat parameter, where it is gathered.

    Args:
        dense: what FSDP1 is about to gather: the slice itself, or a copy of it, in the dtype of
            mixed precision or, with CPU offload, on the accelerator. A copy is written to.
        source: the slice in full precision.
        spans: where the runs of parameters are in it, and their masks, on any device.
    """
    masked = dense.clone() if dense.data_ptr() == source.data_ptr() else dense
    for span, mask in spans:
        run = masked[span]
        # Rounded after the product: an element may be inf in low precision, and inf * 0 is NaN.
        exact = run if run.dtype == source.dtype else source[span].to(run.device, non_blocking=True)
        write_product(exact, mask.to(run.device), out=run)
    return masked


def whole_mask(piece: FlatPiece, run: Tensor) -> Tensor:
    """The whole mask, bool, of the parameter's shape. Collective over the shards.

    Args:
        run: this rank's run of it.

    Cost: one all-reduce of one bit per element.
    """
    flat = np.zeros(piece.shape.numel(), dtype=bool)
    flat[piece.start : piece.start + run.numel()] = run.cpu().numpy()
    joined = torch.from_numpy(_joined(flat, piece.groups[0]))
    return joined.as_strided(piece.shape, piece.stride).contiguous().to(run.device)


def _run_of(whole: Tensor, piece: FlatPiece, num_elements: int) -> Tensor:
    """This rank's run of a whole mask."""
    in_memory = torch.empty_strided(piece.shape, piece.stride, dtype=torch.bool)
    in_memory.copy_(whole != 0)
    flat = in_memory.as_strided((piece.shape.numel(),), (1,))
    return flat[piece.start : piece.start + num_elements]


def _joined(flags: np.ndarray, group: ProcessGroup) -> np.ndarray:
    """The union of the ranks' flags; no two ranks may set the same one."""
    words = torch.from_numpy(mask_bits.pack_words(flags))
    return mask_bits.unpack_words(over_groups([group]).sum(words).numpy(), len(flags))


def _whole_of(value: DTensor | ShardedTensor, piece: FlatPiece) -> Tensor:
    """A whole mask from the rows that each rank has of it, as FSDP1 shards state dicts."""
    group, shape = piece.groups[0], piece.shape
    rows = -(-shape[0] // group.size())
    if isinstance(value, DTensor):
        local = value.to_local()
    else:
        shards = value.local_shards()
        local = shards[0].tensor if shards else torch.zeros(0, dtype=torch.bool)
    flags = np.zeros((shape[0], shape.numel() // max(shape[0], 1)), dtype=bool)
    first = min(rows * group.rank(), shape[0])
    if local.numel():
        flags[first : first + local.shape[0]] = (local != 0).cpu().reshape(local.shape[0], -1)
    return torch.from_numpy(_joined(flags.reshape(-1), group)).view(shape)
