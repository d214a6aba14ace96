"""FSDP1 (``FullyShardedDataParallel``): its record of a parameter, in its private fields.

FSDP1 joins the parameters of a wrapped module into one flat parameter and gives each rank an
even slice of it, so a rank has a *run* of a parameter's elements, in the order of its memory:

    parameters     | a a a a a a a | b b b b b b b b b b | c c c |
    flat parameter | a a a a a a a   b b b b b b b b b b   c c c | padding |
    slices         |   rank 0    |    rank 1   |   rank 2   |   rank 3     |

State dicts get the whole mask, or this rank's run of it, as FSDP1 was told to save parameters.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, fsdp
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, _shard_utils
from torch.distributed.fsdp._common_utils import HandleTrainingState

from distprune.base import memory
from distprune.base.memory import zero_pruned
from distprune.ranks.collectives import over_groups
from distprune.wrappers import managed

if TYPE_CHECKING:
    from torch.distributed.fsdp import FlatParameter
    from torch.distributed.fsdp._flat_param import FlatParamHandle

# A leaf does not know its wrapper, and FSDP1 keeps no list of its modules.
_known: weakref.WeakSet[FullyShardedDataParallel] = weakref.WeakSet()
_LOADED = -1  # under which a wrapper has our hook; torch counts its hooks from 0 on


@dataclass(frozen=True)
class FlatPiece(managed.StoredRun):
    """One parameter inside a flat parameter.

    Attributes:
        wrapper: the FSDP1 module that owns the flat parameter.
        handle: FSDP1's record of the flat parameter.
        number: of the parameter among those of the flat parameter.
    """

    wrapper: FullyShardedDataParallel
    handle: FlatParamHandle
    number: int
    tells_gathers: ClassVar[bool] = True

    @property
    def flat(self) -> FlatParameter:
        """The flat parameter."""
        return self.handle.flat_param

    @property
    def key(self) -> Hashable:
        return ("flat", id(self.handle), self.number)

    @property
    def leaf_key(self) -> Hashable:
        return ("flat", id(self.handle))

    @property
    def shape(self) -> torch.Size:
        return self.flat._shapes[self.number]

    @property
    def stride(self) -> tuple[int, ...]:
        is_contiguous = self.flat._contiguities[self.number]
        return super().stride if is_contiguous else self.flat._strides[self.number]

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        info = self.flat._param_infos[self.number]
        shared = [
            (other.module, other.param_name)
            for other in self.flat._shared_param_infos
            if other.prim_module is info.module and other.prim_param_name == info.param_name
        ]
        return [(info.module, info.param_name), *shared]

    @property
    def groups(self) -> list[ProcessGroup]:
        replicas = getattr(self.wrapper, "_inter_node_pg", None)
        return [self.handle.process_group, *([] if replicas is None else [replicas])]

    @property
    def layout(self) -> str:
        num_ranks = math.prod(group.size() for group in self.groups)
        return f"FSDP1 {self.wrapper.sharding_strategy.name} over {num_ranks} ranks"

    @property
    def unsupported(self) -> str | None:
        if not self.handle.uses_sharded_strategy:
            return "FSDP1 does not shard it (NO_SHARD, or one rank); use DistributedDataParallel"
        if self.flat._param_extensions[self.number] is not None:
            return "FSDP1 shards a DTensor there; use fully_shard over parallelize_module"
        if self.handle._training_state == HandleTrainingState.SUMMON_FULL_PARAMS:
            return "it is gathered by summon_full_params; prune outside of that context"
        return None

    @property
    def span(self) -> tuple[int, int]:
        info = self.flat._shard_param_infos[self.number]
        return (info.offset_in_shard or 0, info.numel_in_shard or 0) if info.in_shard else (0, 0)

    @property
    def start(self) -> int:
        info = self.flat._shard_param_infos[self.number]
        return (info.intra_param_start_idx or 0) if info.in_shard else 0

    @property
    def runs(self) -> Sequence[tuple[int, int]]:
        size, chunk, first = math.prod(self.shape), _slice_of(self.flat).numel(), self._first
        ranks = range(self.handle.process_group.size() + 1)
        ends = [min(max(rank * chunk - first, 0), size) for rank in ranks]
        return [(start, end - start) for start, end in itertools.pairwise(ends)]

    @property
    def _first(self) -> int:
        """Where the whole parameter begins in the whole flat parameter, which has paddings."""
        pads = self.flat._is_padding_mask
        number = [place for place, is_padding in enumerate(pads) if not is_padding][self.number]
        return sum(self.flat._numels_with_padding[:number])

    @property
    def values(self) -> Tensor:
        return self._part(_slice_of(self.flat))

    def _part(self, of_slice: Tensor) -> Tensor:
        offset, size = self.span
        return of_slice[offset : offset + size]

    def free_gathered(self) -> None:
        # After evaluation the root keeps its gathered copy.
        if hasattr(self.flat, "_local_shard"):  # it is initialised
            self.handle.reshard(free_unsharded_flat_param=not self.handle.needs_unshard())
            self.handle.post_reshard()  # type: ignore[no-untyped-call]

    def has_registered(self, module: nn.Module, name: str) -> bool:
        registered = module._parameters.get(name)
        if registered is None:  # without use_orig_params, or gathered
            return isinstance(module.__dict__.get(name), Tensor)
        return getattr(registered, "_fsdp_flattened", False)

    def hold(self, held: Any) -> None:
        managed.replace_methods(self.handle, self.number, held, **_FUNCTIONS)
        # Only after this FSDP1 has written what it loads into the shards.
        after = functools.partial(_after_loading, weakref.ref(self.handle))
        self.wrapper._load_state_dict_post_hooks[_LOADED] = after

    def release(self, held: Any) -> None:
        if managed.restore_methods(self.handle, self.number, held, *_FUNCTIONS):
            del self.wrapper._load_state_dict_post_hooks[_LOADED]

    @property
    def optimizer_tensor(self) -> tuple[Tensor, slice | None]:
        if self.flat._params is None:  # without use_orig_params
            offset, size = self.span
            return self.flat, slice(offset, offset + size)
        return self.flat._params[self.number], None

    @property
    def gradient(self) -> Tensor | None:
        tensor, run = self.optimizer_tensor
        if not self.span[1]:  # FSDP1 makes no gradient of what it has not
            return self.values.new_empty(0)
        if self.has_unreduced_gradient or tensor.grad is None:
            return None
        return tensor.grad.detach()[run or slice(None)]

    def drop_gradient(self) -> None:
        views = (*(self.flat._params or ()), *(self.flat._shared_params or ()))
        for parameter in (self.flat, *views):
            parameter.grad = None

    @property
    def has_unreduced_gradient(self) -> bool:
        gradient = self.flat.grad
        return gradient is not None and gradient.numel() != _slice_of(self.flat).numel()

    def gradient_source(self) -> managed.GradientSource:
        """The flat parameter, for all its pieces; :attr:`span` says where this one is."""
        shards, *replicas = self.groups
        num_ranks, size = shards.size(), _slice_of(self.flat).numel()
        pieces = functools.partial(managed.padded_pieces, num_ranks=num_ranks, num_elements=size)
        return managed.GradientSource(self.flat, shards, replicas, pieces=pieces)

    def of_leaf(self, gradient: Tensor) -> Tensor:
        start = gradient.storage_offset() + self._first
        return gradient.as_strided(self.shape, self.stride, start)

    def mask_in_state_dict(self, run: Tensor) -> Any:
        wrapper, config = self.wrapper, self.wrapper._state_dict_config
        if wrapper._state_dict_type == StateDictType.LOCAL_STATE_DICT:
            return run
        flags = np.zeros(self.shape.numel(), dtype=bool)
        flags[self.start : self.start + run.numel()] = run.cpu().numpy()
        whole = self._joined(flags).as_strided(self.shape, self.stride).contiguous()
        if isinstance(config, fsdp.FullStateDictConfig) and config.rank0_only and wrapper.rank:
            return None
        part: Tensor | ShardedTensor = whole.to(run.device)
        if wrapper._state_dict_type == StateDictType.SHARDED_STATE_DICT:
            # In rows: ranks without a part of a tensor lead DCP astray, and have no parameter then.
            num_devices = wrapper._device_handle.device_count()
            place = wrapper.rank, wrapper.world_size, num_devices, self.groups[0]
            part = _shard_utils._create_chunk_sharded_tensor(part, *place)
        return part.cpu() if config.offload_to_cpu else part

    def run_in_state_dict(self, saved: Any) -> Tensor:
        if isinstance(saved, ShardedTensor) and saved.size() == self.shape:
            flags = np.zeros(self.shape, dtype=bool)
            for shard in saved.local_shards():
                (offset, *_), (size, *_) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                flags[offset : offset + size] = (shard.tensor != 0).cpu().numpy()
            saved = self._joined(flags.reshape(-1)).view(self.shape)
        return super().run_in_state_dict(saved)

    def _joined(self, flags: np.ndarray) -> Tensor:
        """The union of what the ranks set, 1-d. Collective over the shards.

        Cost: one all-reduce of one bit per element; no two ranks may set the same one.
        """
        words = over_groups(self.groups[:1]).sum(torch.from_numpy(memory.pack_words(flags)))
        return torch.from_numpy(memory.unpack_words(words.numpy(), len(flags)))


def _slice_of(flat: FlatParameter) -> Tensor:
    """This rank's slice of a flat parameter, unmasked and in full precision."""
    return getattr(flat, "_local_shard", flat).detach()


def _after_loading(reference: weakref.ref[FlatParamHandle], *_: Any) -> None:
    handle = reference()
    for held in () if handle is None else managed.users_of(handle).values():
        held.zero()


def _pre_unshard(handle: FlatParamHandle) -> bool:
    """Set the pruned elements to zero before they are cast and gathered: the handle's own method.

    Not before a backward, which gathers what its forward gathered.
    """
    has_changed = False
    if handle._training_state != HandleTrainingState.BACKWARD_PRE:
        if handle._use_orig_params and not (
            handle._skip_writeback_check or handle._skipped_use_sharded_views
        ):
            has_changed = handle._writeback_orig_params()  # type: ignore[no-untyped-call]
        for held in managed.users_of(handle).values():
            held.zero()
    return bool(type(handle).pre_unshard(handle)) or has_changed


def _prepare_gradient_for_optim(handle: FlatParamHandle) -> None:
    """Mask the reduced gradient before the handle's own method lets the optimizer see it."""
    for name in ("_saved_grad_shard", "_cpu_grad"):
        gradient = getattr(handle.flat_param, name, None)
        for held in () if gradient is None else managed.users_of(handle).values():
            run = held.record._part(gradient)
            if run.numel() and not held.has_dense_gradient:
                zero_pruned(run, held.mask)
    type(handle).prepare_gradient_for_optim(handle)  # type: ignore[no-untyped-call]


_FUNCTIONS = {
    "pre_unshard": _pre_unshard,
    "prepare_gradient_for_optim": _prepare_gradient_for_optim,
}


def managed_parameters(root: nn.Module | None, *, everywhere: bool) -> dict[tuple[int, str], Any]:
    """Every piece of the known FSDP1 modules, by (id(module), name).

    Args:
        root: a model whose FSDP1 modules may not be known yet.
        everywhere: walk over all Python objects for modules that are not known yet.
    """
    if root is not None:
        _known.update(FullyShardedDataParallel.fsdp_modules(root))
    for value in gc.get_objects() if everywhere else ():
        if issubclass(type(value), FullyShardedDataParallel):
            _known.add(value)
    pieces: dict[tuple[int, str], FlatPiece] = {}
    for wrapper in list(_known) if _known else ():  # an empty set takes longer to walk than to ask
        handle = getattr(wrapper, "_handle", None)
        if handle is not None:
            for number in range(len(handle.flat_param._param_infos)):
                piece = FlatPiece(wrapper, handle, number)
                pieces |= {(id(module), name): piece for module, name in piece.owners}
    return pieces
