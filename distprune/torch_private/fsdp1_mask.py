"""How a mask acts under FSDP1; like fsdp1, this file knows its private fields.

[Note: masks on a flat parameter] FSDP1 joins the parameters of a wrapped module into one
flat parameter and gives each rank an even slice of it, so a rank has a *run* of a
parameter's elements, in the order of its memory. The mask is multiplied into a copy of the
slice just before the flat parameter is all-gathered, and into the sharded gradient before
the optimizer sees it: three methods of the handle are replaced while it has masks. Inside
``summon_full_params`` and ``state_dict`` the flat parameter is gathered as it is, because
FSDP1 may write back what it gathers there.

The local run of a mask is a non-persistent buffer; hooks put masks into state dicts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from distprune._common.mask_values import write_product
from distprune._common.pruned_form import (
    lost_mask,
    mask_key,
    masked_product,
    name_without_orig,
    orig_key,
)
from distprune.torch_private import dense_gradients
from distprune.torch_private.fsdp1 import FlatPiece, is_summoned, local_slice
from distprune.torch_private.fsdp1_state_dict import LoadHook, SaveHook
from distprune.torch_private.managed import ShardMask

if TYPE_CHECKING:
    from torch.distributed.fsdp._flat_param import FlatParamHandle

_REPLACED = ("needs_unshard", "_all_gather_flat_param", "prepare_gradient_for_optim")
_PIECES = "_distprune_masked_pieces"


class FlatMask(ShardMask):
    """The mask of one parameter at work: see [Note: masks on a flat parameter].

    Args:
        piece: the parameter.
    """

    def __init__(self, piece: FlatPiece) -> None:
        self._piece = piece
        self._hooks: list[RemovableHandle] = []

    def run(self) -> Tensor:
        """This rank's run of the mask, bool, 1-d: the buffer of the module as it is now."""
        module, name = self._piece.owners[0]
        name = name_without_orig(name)
        mask = module._buffers.get(mask_key(name))
        if mask is None:
            raise lost_mask(module, name)
        return mask

    def has_dense_gradient(self) -> bool:
        """Whether the gradient is not to be masked for now."""
        module, name = self._piece.owners[0]
        return dense_gradients.is_dense(module, name_without_orig(name))

    def managed(self) -> FlatPiece:
        return self._piece

    def attach(self) -> None:
        piece = self._piece
        _MaskedPieces.of(piece.handle).add(self._piece.number, self)
        for module, name in piece.owners:
            key = mask_key(name_without_orig(name))
            self._hooks += [
                module.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
                    SaveHook(piece, key, self.run)
                ),
                module.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                    LoadHook(piece, key, self.run)
                ),
            ]

    def detach(self) -> None:
        _MaskedPieces.of(self._piece.handle).drop(self._piece.number, self)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

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
            return dense_gradients.product(module, name, original, self.run())
        return original


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
            # In mixed precision FSDP1 has made a copy of the slice already.
            is_copy = handle._uses_param_mixed_precision and not handle._force_full_precision
            masked = dense if is_copy else dense.clone()
            source = local_slice(handle)
            for span, mask in self._spans():
                run = masked[span]
                if run.device == source.device:
                    write_product(source[span], mask, out=run)
                else:  # offloaded
                    run.copy_(masked_product(source[span], mask))
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
            if size and (with_dense_gradients or not mask.has_dense_gradient()):
                yield slice(offset, offset + size), mask.run()
