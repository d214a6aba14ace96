"""How a mask acts under FSDP1; like fsdp1, this file knows its private fields.

[Note: masks on a flat parameter] FSDP1 joins the parameters of a wrapped module into one
flat parameter and gives each rank an even slice of it, so a rank holds a *run* of a
parameter's elements, in the order of its memory. The mask is multiplied into a copy of the
slice just before the flat parameter is all-gathered, and into the sharded gradient before
the optimizer sees it: three methods of the handle are replaced while it has masks. Inside
``summon_full_params`` and ``state_dict`` the flat parameter is gathered as it is, because
FSDP1 may write back what it gathers there.

The local run of a mask is a non-persistent buffer; state dicts get the whole mask, or a
shard of it laid out like the parameter's, from hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import _shard_utils as shard_utils
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from distprune._common import mask_bits
from distprune._common.collectives import over_groups
from distprune._common.lost import lost_mask
from distprune._common.product import write_product
from distprune._common.pruned_form import mask_key, masked_product, name_without_orig, orig_key

_REPLACED = ("needs_unshard", "_all_gather_flat_param", "prepare_gradient_for_optim")
_PIECES = "_distprune_masked_pieces"


class FlatMask:
    """The mask of one parameter at work: see [Note: masks on a flat parameter].

    Args:
        piece: the parameter, a fsdp1.FlatPiece.
    """

    def __init__(self, piece: Any) -> None:
        self._piece = piece
        self._hooks: list[RemovableHandle] = []

    @property
    def mask(self) -> Tensor:
        """bool, 1-d: the buffer of the module as it is now, wherever it was moved."""
        module, name = self._piece.owners[0]
        name = name_without_orig(name)
        mask = module._buffers.get(mask_key(name))
        if mask is None:
            raise lost_mask(module, name)
        return mask

    def managed(self) -> Any:
        """FSDP1's record of the parameter."""
        return self._piece

    def attach(self) -> None:
        """Let the next all-gather, the gradient and state dicts see this mask."""
        piece = self._piece
        _MaskedPieces.of(piece.handle).add(self._piece.which, self)
        for module, name in piece.owners:
            key = mask_key(name_without_orig(name))
            self._hooks += [
                module.register_state_dict_post_hook(_Saving(self, key)),
                module.register_load_state_dict_pre_hook(_Loading(self, key)),
            ]

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        _MaskedPieces.of(self._piece.handle).drop(self._piece.which, self)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def is_attached(self) -> bool:
        """Whether the mask still acts."""
        return _MaskedPieces.of(self._piece.handle).masks.get(self._piece.which) is self

    def value(self, module: nn.Module, name: str) -> Tensor:
        """``module.<name>`` as the mask leaves it: gathered inside forward, else this rank's run.

        Raises:
            RuntimeError: inside ``summon_full_params``, which gathers without the mask.
        """
        key = orig_key(name)
        original = getattr(module, key)
        if is_summoned(self._piece.handle):
            raise RuntimeError(
                f"{type(module).__name__}.{name} was read inside summon_full_params, where FSDP1 "
                f"gathers {key} without its mask. Run the model outside of that context, "
                "or remove() the pruning first."
            )
        if isinstance(original, nn.Parameter):  # use_orig_params=True, outside of forward
            return masked_product(original, self.mask)
        return original

    def whole(self) -> Tensor:
        """The whole mask, bool, of the parameter's shape. Collective over the shards.

        Cost: one all-reduce of one bit per element.
        """
        piece = self._piece
        flat = np.zeros(piece.shape.numel(), dtype=bool)
        flat[piece.start : piece.start + self.mask.numel()] = self.mask.cpu().numpy()
        joined = torch.from_numpy(_joined(flat, piece.groups[0]))
        return joined.as_strided(piece.shape, piece.stride).contiguous().to(self.mask.device)

    def load(self, value: Any) -> None:
        """Take this rank's run of a mask from a state dict. Collective if that is sharded."""
        piece = self._piece
        whole = _whole_of(value, piece) if type(value) is not Tensor else value
        in_memory = torch.empty_strided(piece.shape, piece.stride, dtype=torch.bool)
        in_memory.copy_(whole != 0)
        flat = in_memory.as_strided((piece.shape.numel(),), (1,))
        self.load_run(flat[piece.start : piece.start + self.mask.numel()])

    def load_run(self, run: Tensor) -> None:
        """Take a mask of this rank's run."""
        self.mask.copy_(run != 0)
        if not is_summoned(self._piece.handle):
            self._piece.free_gathered()


class _MaskedPieces:
    """The masks on one handle; in the place of three of its methods while there are any."""

    def __init__(self, handle: Any) -> None:
        self._handle_ref = weakref.ref(handle)
        self._gathered_raw = False
        self.masks: dict[int, FlatMask] = {}

    @staticmethod
    def of(handle: Any) -> _MaskedPieces:
        if _PIECES not in handle.__dict__:
            handle.__dict__[_PIECES] = _MaskedPieces(handle)
        return handle.__dict__[_PIECES]

    def add(self, which: int, mask: FlatMask) -> None:
        self.masks[which] = mask
        handle = self._handle_ref()
        handle.needs_unshard = self._needs_unshard
        handle._all_gather_flat_param = self._all_gather_flat_param
        handle.prepare_gradient_for_optim = self._prepare_gradient_for_optim

    def drop(self, which: int, mask: FlatMask) -> None:
        if self.masks.get(which) is mask:
            del self.masks[which]
        if not self.masks:
            handle = self._handle_ref()
            for name in (*_REPLACED, _PIECES):
                handle.__dict__.pop(name, None)

    # The methods below are called by FSDP1 as it calls its own.

    def _needs_unshard(self) -> bool:
        handle = self._handle_ref()
        needed = type(handle).needs_unshard(handle)
        if not needed and self._gathered_raw != is_summoned(handle):
            # After evaluation the root's gathered copy stays: masked, and not for a state dict.
            handle._free_unsharded_flat_param()
            return True
        return needed

    def _all_gather_flat_param(self, padded_unsharded_flat_param: Tensor) -> Tensor:
        handle = self._handle_ref()
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
        handle = self._handle_ref()
        for name in ("_saved_grad_shard", "_cpu_grad"):
            gradient = getattr(handle.flat_param, name, None)
            if gradient is not None:
                for span, mask in self._spans():
                    run = gradient[span]
                    write_product(run, mask.to(gradient.device), out=run)
        type(handle).prepare_gradient_for_optim(handle)

    def _spans(self) -> Iterator[tuple[slice, Tensor]]:
        for mask in self.masks.values():
            offset, size = mask._piece.span
            if size:
                yield slice(offset, offset + size), mask.mask


class _Saving:
    """Puts a mask into the state dict of its module, in the form that FSDP1 was told to use."""

    def __init__(self, mask: FlatMask, key: str) -> None:
        self._mask, self._key = mask, key

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        state, config = self._mask._piece.state, self._mask._piece.state._state_dict_config
        key = prefix + self._key
        if state._state_dict_type == StateDictType.LOCAL_STATE_DICT:
            state_dict[key] = self._mask.mask
            return
        whole = self._mask.whole()
        if state._state_dict_type == StateDictType.FULL_STATE_DICT:
            if isinstance(config, FullStateDictConfig) and config.rank0_only and state.rank:
                return
            state_dict[key] = whole.cpu() if config.offload_to_cpu else whole
            return
        if config._use_dtensor:
            part = shard_utils._create_chunk_dtensor(whole, state.rank, state._device_mesh)
        else:
            part = shard_utils._create_chunk_sharded_tensor(
                whole,
                state.rank,
                state.world_size,
                state._device_handle.device_count(),
                state.process_group,
            )
        state_dict[key] = part.cpu() if config.offload_to_cpu else part


class _Loading:
    """Takes a mask out of a state dict, before the module looks for what it knows."""

    def __init__(self, mask: FlatMask, key: str) -> None:
        self._mask, self._key = mask, key

    def __call__(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + self._key
        if key in state_dict:
            value, shape = state_dict.pop(key), self._mask._piece.shape
            if self._mask._piece.state._state_dict_type == StateDictType.LOCAL_STATE_DICT:
                num_elements = self._mask.mask.numel()
                if torch.Size(value.size()) == (num_elements,):
                    self._mask.load_run(value)
                else:
                    error_msgs.append(
                        f"size mismatch for {key}: the state dict has {tuple(value.size())}, "
                        f"expected this rank's {num_elements} elements of the mask, as "
                        "LOCAL_STATE_DICT has them of a model that is sharded in the same way."
                    )
            elif torch.Size(value.size()) == shape:
                self._mask.load(value)
            else:
                error_msgs.append(
                    f"size mismatch for {key}: the state dict has {tuple(value.size())}, expected "
                    f"the mask of a parameter of shape {tuple(shape)}."
                )
        elif strict:
            missing_keys.append(key)


def is_summoned(handle: Any) -> bool:
    """Whether FSDP1 has gathered the flat parameter for state_dict or summon_full_params."""
    return handle._training_state == HandleTrainingState.SUMMON_FULL_PARAMS


def local_slice(handle: Any) -> Tensor:
    """This rank's slice of the flat parameter, unmasked and in full precision."""
    flat_param = handle.flat_param
    return getattr(flat_param, "_local_shard", flat_param).detach()


def _joined(flags: np.ndarray, group: Any) -> np.ndarray:
    """The union of the ranks' flags, which no two ranks have set at the same place."""
    words = torch.from_numpy(mask_bits.pack_words(flags))
    return mask_bits.unpack_words(over_groups([group]).sum(words).numpy(), len(flags))


def _whole_of(value: Any, piece: Any) -> Tensor:
    """A whole mask from the rows of it that each rank has, as FSDP1 shards state dicts."""
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
