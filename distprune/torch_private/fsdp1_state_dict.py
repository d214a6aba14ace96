"""Masks in the state dicts of FSDP1; like fsdp1, this file knows its private fields.

State dicts get the whole mask, or a shard of it laid out like the parameter's, from hooks of the
module that owns the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import _shard_utils as shard_utils
from torch.distributed.tensor import DTensor

from distprune._common import mask_bits
from distprune._common.process_groups import over_groups
from distprune.torch_private.fsdp1 import FlatPiece, is_summoned


class SaveHook:
    """Puts a mask into the state dict of its module, in the form that FSDP1 was told to use.

    Args:
        piece: the parameter.
        key: of the mask in its module.
        mask: returns this rank's run of the mask, bool, 1-d, as it is now.
    """

    def __init__(self, piece: FlatPiece, key: str, mask: Callable[[], Tensor]) -> None:
        self._piece, self._key, self._mask = piece, key, mask

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        wrapper, config = self._piece.wrapper, self._piece.wrapper._state_dict_config
        key = prefix + self._key
        if wrapper._state_dict_type == StateDictType.LOCAL_STATE_DICT:
            state_dict[key] = self._mask()
            return
        whole = whole_mask(self._piece, self._mask())
        if wrapper._state_dict_type == StateDictType.FULL_STATE_DICT:
            if isinstance(config, FullStateDictConfig) and config.rank0_only and wrapper.rank:
                return
            state_dict[key] = whole.cpu() if config.offload_to_cpu else whole
            return
        part: DTensor | ShardedTensor
        if wrapper._device_mesh is not None and getattr(config, "_use_dtensor", False):
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
        state_dict[key] = part.cpu() if config.offload_to_cpu else part


class LoadHook:
    """Takes a mask out of a state dict, before its module loads the rest.

    Args:
        piece, key, mask: as for :class:`SaveHook`.
    """

    def __init__(self, piece: FlatPiece, key: str, mask: Callable[[], Tensor]) -> None:
        self._piece, self._key, self._mask = piece, key, mask

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
            value, shape = state_dict.pop(key), self._piece.shape
            if self._piece.wrapper._state_dict_type == StateDictType.LOCAL_STATE_DICT:
                num_elements = self._mask().numel()
                if torch.Size(value.size()) == (num_elements,):
                    self._load_run(value)
                else:
                    error_msgs.append(
                        f"size mismatch for {key}: the state dict has {tuple(value.size())}, "
                        f"expected this rank's {num_elements} elements of the mask, as "
                        "LOCAL_STATE_DICT has them of a model that is sharded in the same way."
                    )
            elif torch.Size(value.size()) == shape:
                whole = value if type(value) is Tensor else _whole_of(value, self._piece)
                self._load_run(_run_of(whole, self._piece, self._mask().numel()))
            else:
                error_msgs.append(
                    f"size mismatch for {key}: the state dict has {tuple(value.size())}, expected "
                    f"the mask of a parameter of shape {tuple(shape)}."
                )
        elif strict:
            missing_keys.append(key)

    def _load_run(self, run: Tensor) -> None:
        self._mask().copy_(run != 0)
        if not is_summoned(self._piece.handle):
            self._piece.free_gathered()


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
