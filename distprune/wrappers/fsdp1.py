"""FSDP1 (``FullyShardedDataParallel``): the only file that knows its private fields.

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

import gc
import weakref
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.distributed.fsdp import (
    FlatParameter,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.fsdp import _shard_utils as shard_utils
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from distprune.collectives import Communicator, over_groups

_HANDLE_FIELDS = (
    "flat_param", "process_group", "uses_sharded_strategy", "_training_state",
    "_all_gather_flat_param", "prepare_gradient_for_optim", "_uses_param_mixed_precision",
    "_force_full_precision", "needs_unshard", "reshard", "post_reshard",
    "_free_unsharded_flat_param",
)  # fmt: skip
_FLAT_FIELDS = (
    "_param_infos", "_shared_param_infos", "_fqns", "_shapes", "_strides", "_contiguities",
    "_shard_param_infos", "_param_extensions",
)  # fmt: skip
_REPLACED = ("needs_unshard", "_all_gather_flat_param", "prepare_gradient_for_optim")
_MANAGED = "_fsdp_flattened"
_PIECES = "_distprune_masked_pieces"

# A leaf does not know its wrapper, and FSDP1 keeps no list of its modules.
_known: weakref.WeakSet[FullyShardedDataParallel] = weakref.WeakSet()


def is_managed(module: nn.Module, name: str) -> bool:
    """Whether a parameter is a piece of an FSDP1 flat parameter."""
    registered = module._parameters.get(name)
    if isinstance(registered, FlatParameter) or getattr(registered, _MANAGED, False):
        return True
    # Without use_orig_params, and inside forward: a view of the flat parameter.
    view = module.__dict__.get(name) if registered is None else registered
    base = view._base if isinstance(view, Tensor) else None
    return isinstance(base, FlatParameter) or getattr(base, _MANAGED, False)


@dataclass(frozen=True)
class FlatPiece:
    """One parameter inside a flat parameter; a wrappers.Managed.

    Attributes:
        state: the FSDP1 module that owns the flat parameter.
        which: the parameter's place among those of the flat parameter.
    """

    state: FullyShardedDataParallel
    which: int

    @property
    def handle(self) -> Any:
        """FSDP1's FlatParamHandle."""
        return self.state._handle

    @property
    def key(self) -> Hashable:
        """The same for every name of a tied parameter."""
        return ("flat", id(self.handle), self.which)

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return self.handle.flat_param._shapes[self.which]

    @property
    def stride(self) -> tuple[int, ...]:
        """Of the whole parameter: the slice follows its memory."""
        flat_param = self.handle.flat_param
        if flat_param._contiguities[self.which]:
            return torch.empty(self.shape, device="meta").stride()
        return flat_param._strides[self.which]

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        """Every (module, name) under which FSDP1 registers the parameter."""
        flat_param = self.handle.flat_param
        info = flat_param._param_infos[self.which]
        shared = [
            (other.module, other.param_name)
            for other in flat_param._shared_param_infos
            if other.prim_module is info.module and other.prim_param_name == info.param_name
        ]
        return [(info.module, info.param_name), *shared]

    @property
    def persists_mask(self) -> bool:
        """No: hooks of :class:`FlatMask` put the mask into state dicts."""
        return False

    @property
    def unsupported(self) -> str | None:
        """Why a mask cannot act on this parameter; None if it can."""
        handle = self.handle
        if not handle.uses_sharded_strategy:
            return (
                "FSDP1 does not shard it (ShardingStrategy.NO_SHARD, to which FSDP1 also switches "
                "by itself on one rank); wrap the model in DistributedDataParallel, or in nothing"
            )
        if handle.flat_param._param_extensions[self.which] is not None:
            return (
                "FSDP1 shards a DTensor there (tensor parallelism under FullyShardedDataParallel); "
                "use fully_shard over parallelize_module"
            )
        if _is_summoned(handle):
            return (
                "it is gathered by summon_full_params, which may write it back; prune outside "
                "of that context"
            )
        return None

    @property
    def span(self) -> tuple[int, int]:
        """(offset, size) of this rank's run in the local slice of the flat parameter."""
        info = self.handle.flat_param._shard_param_infos[self.which]
        return (info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0)

    @property
    def start(self) -> int:
        """Where this rank's run begins in the memory of the whole parameter."""
        info = self.handle.flat_param._shard_param_infos[self.which]
        return info.intra_param_start_idx if info.in_shard else 0

    @property
    def values(self) -> Tensor:
        """This rank's run, 1-d, a view of the unmasked shard."""
        offset, size = self.span
        return _local_slice(self.handle)[offset : offset + size]

    @property
    def groups(self) -> list[Any]:
        """Process groups that hold the parameter together: shards, then replicas (HYBRID)."""
        replicas = getattr(self.state, "_inter_node_pg", None)
        return [self.handle.process_group, *([replicas] if replicas is not None else [])]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that hold the parameter together."""
        me, ranks = get_rank(), {0}
        for group in self.groups:  # the axes of a grid
            members = torch.distributed.get_process_group_ranks(group)
            ranks = {base + member - me for base in ranks for member in members}
        return tuple(sorted(me + offset for offset in ranks))

    @property
    def replica(self) -> tuple[int, int]:
        """Which copy of its elements this rank holds, and how many there are."""
        _, *replicas = self.groups
        return (replicas[0].rank(), replicas[0].size()) if replicas else (0, 1)

    @property
    def layout(self) -> str:
        """For messages, and for comparing ranks."""
        return f"FSDP1 {self.state.sharding_strategy.name} over {len(self.ranks)} ranks"

    def check_fields(self) -> None:
        """Raise NotImplementedError naming the private fields that this torch lacks."""
        handle = self.handle
        missing = [name for name in _HANDLE_FIELDS if not hasattr(handle, name)]
        missing += [name for name in _FLAT_FIELDS if not hasattr(handle.flat_param, name)]
        if missing:
            raise NotImplementedError(
                f"torch {torch.__version__} changed FSDP1's {', '.join(missing)}; distprune "
                "supports torch 2.11 to 2.13. Install one of these, or a newer distprune."
            )

    def reshard(self) -> None:
        """Free the gathered copy if there is one: after evaluation the root keeps its own."""
        handle = self.handle
        is_initialized = hasattr(handle.flat_param, "_local_shard")
        if is_initialized:
            handle.reshard(free_unsharded_flat_param=not handle.needs_unshard())
            handle.post_reshard()

    def rename(self, old: str, new: str) -> None:
        """Tell FSDP1 that what it registers as ``old`` is to be registered as ``new``."""
        flat_param = self.handle.flat_param
        infos, fqns = list(flat_param._param_infos), list(flat_param._fqns)
        info = infos[self.which]
        shared = []
        for other in flat_param._shared_param_infos:
            if other.prim_module is info.module and other.prim_param_name == old:
                name = new if other.param_name == old else other.param_name
                other = other._replace(param_name=name, prim_param_name=new)
            shared.append(other)
        infos[self.which] = info._replace(param_name=new)
        fqns[self.which] = fqns[self.which].removesuffix(old) + new
        flat_param._param_infos, flat_param._fqns = tuple(infos), tuple(fqns)
        flat_param._shared_param_infos = tuple(shared)

    def write(self, values: Tensor) -> None:
        """Overwrite this rank's shard."""
        self.values.copy_(values)

    def masked_by(self, mask: Tensor) -> FlatMask:
        """What lets a mask, this rank's run of it, act on the parameter."""
        return FlatMask(self)


class FlatMask:
    """The mask of one piece at work: see [Note: masks on a flat parameter]."""

    def __init__(self, piece: FlatPiece) -> None:
        self._state_ref = weakref.ref(piece.state)
        self._which = piece.which
        self._hooks: list[RemovableHandle] = []

    @property
    def mask(self) -> Tensor:
        """bool, 1-d: the buffer of the module as it is now, wherever it was moved."""
        module, name = self._piece.owners[0]
        mask = module._buffers[name.removesuffix("_orig") + "_mask"]
        assert mask is not None
        return mask

    @property
    def _piece(self) -> FlatPiece:
        state = self._state_ref()
        assert state is not None
        return FlatPiece(state, self._which)

    def attach(self) -> None:
        """Let the next all-gather, the gradient and state dicts see this mask."""
        piece = self._piece
        _MaskedPieces.of(piece.handle).add(self._which, self)
        for module, name in piece.owners:
            key = name.removesuffix("_orig") + "_mask"
            self._hooks += [
                module.register_state_dict_post_hook(_Saving(self, key)),
                module.register_load_state_dict_pre_hook(_Loading(self, key)),
            ]

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        _MaskedPieces.of(self._piece.handle).drop(self._which, self)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def is_attached(self) -> bool:
        """Whether the mask still acts."""
        return _MaskedPieces.of(self._piece.handle).masks.get(self._which) is self

    def value(self, module: nn.Module, name: str) -> Tensor:
        """``module.<name>`` as the mask leaves it: gathered inside forward, else this rank's run.

        Raises:
            RuntimeError: inside ``summon_full_params``, which gathers without the mask.
        """
        original = getattr(module, name + "_orig")
        if _is_summoned(self._piece.handle):
            raise RuntimeError(
                f"{type(module).__name__}.{name} was read inside summon_full_params, where FSDP1 "
                f"gathers {name}_orig without its mask. Run the model outside of that context, "
                "or remove() the pruning first."
            )
        if isinstance(original, nn.Parameter):  # use_orig_params=True, outside of forward
            return original * self.mask
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
        self.mask.copy_(flat[piece.start : piece.start + self.mask.numel()])
        if not _is_summoned(piece.handle):
            piece.reshard()


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
        if not needed and self._gathered_raw != _is_summoned(handle):
            # After evaluation the root's gathered copy stays: masked, and not for a state dict.
            handle._free_unsharded_flat_param()
            return True
        return needed

    def _all_gather_flat_param(self, padded_unsharded_flat_param: Tensor) -> Tensor:
        handle = self._handle_ref()
        gather = type(handle)._all_gather_flat_param
        self._gathered_raw = _is_summoned(handle)
        if self._gathered_raw:
            return gather(handle, padded_unsharded_flat_param)
        flat_param = handle.flat_param
        dense = flat_param.data
        with torch.inference_mode(False), torch.no_grad():
            # In mixed precision FSDP1 has made a copy of the slice already.
            is_copy = handle._uses_param_mixed_precision and not handle._force_full_precision
            masked = dense if is_copy else dense.clone()
            source = _local_slice(handle)
            for span, mask in self._spans():
                # A product, not a select: the same bits (-0.0, NaN) as one process gets.
                masked[span].copy_(source[span] * mask)
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
                    gradient[span].mul_(mask.to(gradient.device))
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
            if torch.Size(value.size()) == shape:
                self._mask.load(value)
            else:
                error_msgs.append(
                    f"size mismatch for {key}: the state dict has {tuple(value.size())}, expected "
                    f"the mask of a parameter of shape {tuple(shape)}."
                )
        elif strict:
            missing_keys.append(key)


def managed_parameters(root: nn.Module | None = None) -> dict[tuple[int, str], FlatPiece]:
    """Every piece of the known FSDP1 modules, by (id(module), name).

    Args:
        root: a model, to get to know its FSDP1 modules.
    """
    if root is not None:
        _known.update(FullyShardedDataParallel.fsdp_modules(root))
    found: dict[tuple[int, str], FlatPiece] = {}
    for state in list(_known):
        handle = getattr(state, "_handle", None)
        if handle is None:
            continue
        for which in range(len(handle.flat_param._param_infos)):
            piece = FlatPiece(state, which)
            for module, name in piece.owners:
                found[id(module), name] = piece
    return found


def find_modules() -> None:
    """Get to know every FSDP1 module of this process: one walk over all Python objects."""
    for each in gc.get_objects():
        if issubclass(type(each), FullyShardedDataParallel):
            _known.add(each)


def _is_summoned(handle: Any) -> bool:
    """Whether FSDP1 has gathered the flat parameter for state_dict or summon_full_params."""
    return handle._training_state == HandleTrainingState.SUMMON_FULL_PARAMS


def _local_slice(handle: Any) -> Tensor:
    """This rank's slice of the flat parameter, unmasked and in full precision."""
    flat_param = handle.flat_param
    return getattr(flat_param, "_local_shard", flat_param).detach()


def _joined(flags: np.ndarray, group: Any) -> np.ndarray:
    """The union of the ranks' flags, which no two ranks have set at the same place."""
    words = np.zeros(-(-len(flags) // 64), dtype=np.int64)
    packed = np.packbits(flags)
    words.view(np.uint8)[: len(packed)] = packed
    communicator: Communicator = over_groups([group])
    joined = communicator.sum(torch.from_numpy(words)).numpy()
    return np.unpackbits(joined.view(np.uint8), count=len(flags)).astype(bool)


def _whole_of(value: Any, piece: FlatPiece) -> Tensor:
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
