"""FSDP1 (``FullyShardedDataParallel``): its record of a parameter, in its private fields.

FSDP1 joins the parameters of a wrapped module into one flat parameter and gives each rank an
even slice of it, so a rank has a *run* of a parameter's elements, in the order of its memory:

    parameters     | a a a a a a a | b b b b b b b b b b | c c c |
    flat parameter | a a a a a a a   b b b b b b b b b b   c c c | padding |
    slices         |   rank 0    |    rank 1   |   rank 2   |   rank 3     |

State dicts get the whole mask, or a shard of it that is laid out like the parameter's.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import (
    FlatParameter,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.fsdp import _shard_utils as shard_utils
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.tensor import DTensor

from distprune.base import mask_bits
from distprune.base.mask_values import zero_pruned
from distprune.ranks.process_groups import over_groups
from distprune.wrappers import private_fields
from distprune.wrappers.managed import GradientSource, HoldsZeros, ManagedRun, padded_pieces

if TYPE_CHECKING:
    from torch.distributed.fsdp._flat_param import FlatParamHandle


_MANAGED = "_fsdp_flattened"

# A leaf does not know its wrapper, and FSDP1 keeps no list of its modules.
_known: weakref.WeakSet[FullyShardedDataParallel] = weakref.WeakSet()


def is_managed(module: nn.Module, name: str) -> bool:
    """Whether a parameter is a piece of an FSDP1 flat parameter."""
    found = module._parameters.get(name)
    if found is None:
        found = module.__dict__.get(name)
    elif is_piece(found):
        return True
    # Without use_orig_params, and inside forward: a view of the flat parameter.
    base = found._base if isinstance(found, Tensor) else None
    return base is not None and is_piece(base)


def is_flat(tensor: Tensor) -> bool:
    """Whether a tensor is a flat parameter."""
    return isinstance(tensor, FlatParameter)


def is_piece(tensor: Tensor) -> bool:
    """Whether a tensor is a flat parameter, or one of its pieces (with use_orig_params)."""
    return isinstance(tensor, FlatParameter) or getattr(tensor, _MANAGED, False)


@dataclass(frozen=True)
class FlatPiece(ManagedRun):
    """One parameter inside a flat parameter.

    Attributes:
        wrapper: the FSDP1 module that owns the flat parameter.
        number: of the parameter among those of the flat parameter.
    """

    wrapper: FullyShardedDataParallel
    number: int

    @property
    def handle(self) -> FlatParamHandle:
        """FSDP1's record of the flat parameter."""
        handle = self.wrapper._handle
        assert handle is not None  # a wrapper without parameters has no pieces
        return handle

    @property
    def key(self) -> Hashable:
        return ("flat", id(self.handle), self.number)

    @property
    def shape(self) -> torch.Size:
        return self.handle.flat_param._shapes[self.number]

    @property
    def stride(self) -> tuple[int, ...]:
        flat_param = self.handle.flat_param
        if flat_param._contiguities[self.number]:
            return torch.empty(self.shape, device="meta").stride()
        return flat_param._strides[self.number]

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        flat_param = self.handle.flat_param
        info = flat_param._param_infos[self.number]
        shared = [
            (other.module, other.param_name)
            for other in flat_param._shared_param_infos
            if other.prim_module is info.module and other.prim_param_name == info.param_name
        ]
        return [(info.module, info.param_name), *shared]

    @property
    def unsupported(self) -> str | None:
        handle = self.handle
        if not handle.uses_sharded_strategy:
            return (
                "FSDP1 does not shard it (ShardingStrategy.NO_SHARD, to which FSDP1 also switches "
                "by itself on one rank); wrap the model in DistributedDataParallel, or in nothing"
            )
        if handle.flat_param._param_extensions[self.number] is not None:
            return (
                "FSDP1 shards a DTensor there (tensor parallelism under FullyShardedDataParallel); "
                "use fully_shard over parallelize_module"
            )
        if is_summoned(handle):
            return (
                "it is gathered by summon_full_params, which may write it back; prune outside "
                "of that context"
            )
        return None

    @property
    def span(self) -> tuple[int, int]:
        """(offset, size) of this rank's run in the local slice of the flat parameter."""
        info = self.handle.flat_param._shard_param_infos[self.number]
        return (info.offset_in_shard or 0, info.numel_in_shard or 0) if info.in_shard else (0, 0)

    @property
    def start(self) -> int:
        info = self.handle.flat_param._shard_param_infos[self.number]
        return (info.intra_param_start_idx or 0) if info.in_shard else 0

    @property
    def values(self) -> Tensor:
        offset, size = self.span
        return local_slice(self.handle)[offset : offset + size]

    @property
    def groups(self) -> list[ProcessGroup]:
        replicas = getattr(self.wrapper, "_inter_node_pg", None)
        return [self.handle.process_group, *([replicas] if replicas is not None else [])]

    @property
    def runs(self) -> Sequence[tuple[int, int]]:
        size, chunk = math.prod(self.shape), local_slice(self.handle).numel()
        first = _start_in_flat_parameter(self)
        # What each rank's slice of the flat parameter has of the parameter.
        ends = [
            min(max(rank * chunk - first, 0), size)
            for rank in range(self.handle.process_group.size() + 1)
        ]
        return [(start, end - start) for start, end in itertools.pairwise(ends)]

    @property
    def leaf_key(self) -> Hashable:
        return ("flat", id(self.handle))

    @property
    def layout(self) -> str:
        num_ranks = math.prod(group.size() for group in self.groups)
        return f"FSDP1 {self.wrapper.sharding_strategy.name} over {num_ranks} ranks"

    def check_fields(self) -> None:
        handle = self.handle
        objects = {"FullyShardedDataParallel": self.wrapper, "FlatParamHandle": handle}
        private_fields.check("FSDP1", objects | {"FlatParameter": handle.flat_param})

    def free_gathered(self) -> None:
        # After evaluation the root keeps its gathered copy.
        handle = self.handle
        is_initialized = hasattr(handle.flat_param, "_local_shard")
        if is_initialized:
            handle.reshard(free_unsharded_flat_param=not handle.needs_unshard())
            handle.post_reshard()  # type: ignore[no-untyped-call]

    def has_registered(self, module: nn.Module, name: str) -> bool:
        registered, flat_param = module._parameters.get(name), self.handle.flat_param
        if registered is None:  # without use_orig_params, or gathered
            return isinstance(module.__dict__.get(name), Tensor)
        fields = ("_params", "_shared_params")
        views = [view for field in fields for view in getattr(flat_param, field, None) or ()]
        return any(registered is view for view in views)

    def hold(self, held: HoldsZeros) -> None:
        self.free_gathered()
        handle, wrapper = self.handle, self.wrapper
        of_handle = handle.__dict__.setdefault(_HELD, {})
        if not of_handle:
            reference = weakref.ref(handle)
            for name, function in _REPLACED.items():
                handle.__dict__[name] = functools.partial(function, reference)
            # Only after this FSDP1 has written what it loads into the shards.
            register: Callable[[Any], Any] = wrapper.register_load_state_dict_post_hook
            handle.__dict__[_LOADED] = register(functools.partial(_after_loading, reference))
        of_handle[self.number] = held

    def release(self, held: HoldsZeros) -> None:
        self.free_gathered()
        own = self.handle.__dict__
        if own.get(_HELD, {}).get(self.number) is held:
            del own[_HELD][self.number]
            if not own[_HELD]:
                own.pop(_LOADED).remove()
                for name in (*_REPLACED, _HELD):
                    del own[name]

    @property
    def optimizer_tensor(self) -> tuple[Tensor, slice | None]:
        flat_param, (offset, size) = self.handle.flat_param, self.span
        if flat_param._params is None:  # without use_orig_params
            return flat_param, slice(offset, offset + size)
        return flat_param._params[self.number], None

    def gradient_source(self) -> FlatSource:
        return FlatSource(self)

    def of_leaf(self, gradient: Tensor) -> Tensor:
        start = gradient.storage_offset() + _start_in_flat_parameter(self)
        return gradient.as_strided(self.shape, self.stride, start)

    @property
    def gradient(self) -> Tensor | None:
        flat_param, (offset, size) = self.handle.flat_param, self.span
        if self.has_unreduced_gradient:
            return None
        if flat_param._params is None:
            whole = flat_param.grad
            return None if whole is None else whole[offset : offset + size].detach()
        if not size:  # FSDP1 makes no gradient of what it has not
            return self.values.new_empty(0)
        gradient = flat_param._params[self.number].grad
        return None if gradient is None else gradient.detach()

    def drop_gradient(self) -> None:
        flat_param = self.handle.flat_param
        for parameter in (
            flat_param,
            *(flat_param._params or ()),
            *(flat_param._shared_params or ()),
        ):
            parameter.grad = None

    @property
    def has_unreduced_gradient(self) -> bool:
        gradient = self.handle.flat_param.grad
        return gradient is not None and gradient.numel() != local_slice(self.handle).numel()

    def write(self, values: Tensor) -> None:
        self.values.copy_(values)

    def mask_in_state_dict(self, run: Tensor) -> Any:
        """In the form that FSDP1 was told to use in state dicts."""
        wrapper, config = self.wrapper, self.wrapper._state_dict_config
        if wrapper._state_dict_type == StateDictType.LOCAL_STATE_DICT:
            return run
        whole = whole_mask(self, run)
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

    def run_in_state_dict(self, saved: Any) -> Tensor:
        size = self.values.numel()
        is_local = self.wrapper._state_dict_type == StateDictType.LOCAL_STATE_DICT
        expected = torch.Size((size,)) if is_local else self.shape
        if torch.Size(saved.size()) != expected:
            raise ValueError(
                f"this rank's {size} elements of the mask, as LOCAL_STATE_DICT has them of a model "
                "that is sharded in the same way"
                if is_local
                else f"the mask of a parameter of shape {tuple(expected)}"
            )
        if is_local:
            run: Tensor = saved
            return run
        whole = saved if type(saved) is Tensor else _whole_of(saved, self)
        in_memory = torch.empty_strided(self.shape, self.stride, dtype=torch.bool)
        in_memory.copy_(whole != 0)
        flat = in_memory.as_strided((self.shape.numel(),), (1,))
        return flat[self.start : self.start + size]


def is_summoned(handle: FlatParamHandle) -> bool:
    """Whether FSDP1 has gathered the flat parameter for state_dict or summon_full_params."""
    return handle._training_state == HandleTrainingState.SUMMON_FULL_PARAMS


def local_slice(handle: FlatParamHandle) -> Tensor:
    """This rank's slice of the flat parameter, unmasked and in full precision."""
    flat_param: Tensor = handle.flat_param
    local: Tensor = getattr(flat_param, "_local_shard", flat_param)
    return local.detach()


_HELD, _LOADED = "_distprune_held", "_distprune_after_loading"


def _zero(handle: FlatParamHandle) -> None:
    for held in handle.__dict__[_HELD].values():
        held.zero()


def _after_loading(reference: weakref.ref[FlatParamHandle], *_: Any) -> None:
    handle = reference()
    if handle is not None:
        _zero(handle)


def _pre_unshard(reference: weakref.ref[FlatParamHandle]) -> bool:
    """Set the pruned elements to zero before they are cast and gathered: the handle's own method.

    Not before a backward, which gathers what its forward gathered.
    """
    handle = reference()
    assert handle is not None  # it owns what calls this
    has_changed = False
    if handle._training_state != HandleTrainingState.BACKWARD_PRE:
        if handle._use_orig_params and not (
            handle._skip_writeback_check or handle._skipped_use_sharded_views
        ):
            has_changed = handle._writeback_orig_params()  # type: ignore[no-untyped-call]
        _zero(handle)
    return bool(type(handle).pre_unshard(handle)) or has_changed


def _prepare_gradient_for_optim(reference: weakref.ref[FlatParamHandle]) -> None:
    """Mask the reduced gradient before the handle's own method lets the optimizer see it."""
    handle = reference()
    assert handle is not None
    for name in ("_saved_grad_shard", "_cpu_grad"):
        gradient = getattr(handle.flat_param, name, None)
        if gradient is None:
            continue
        for held in handle.__dict__[_HELD].values():
            piece: FlatPiece = held.record
            offset, size = piece.span
            if size and not held.has_dense_gradient:
                run = gradient[offset : offset + size]
                zero_pruned(run, held.mask.to(run.device))
    type(handle).prepare_gradient_for_optim(handle)  # type: ignore[no-untyped-call]


_REPLACED: dict[str, Callable[..., Any]] = {
    "pre_unshard": _pre_unshard,
    "prepare_gradient_for_optim": _prepare_gradient_for_optim,
}


def managed_parameters(root: nn.Module | None = None) -> dict[tuple[int, str], FlatPiece]:
    """Every piece of the known FSDP1 modules, by (id(module), name).

    Args:
        root: a model whose FSDP1 modules may not be known yet.
    """
    if root is not None:
        _known.update(FullyShardedDataParallel.fsdp_modules(root))
    pieces: dict[tuple[int, str], FlatPiece] = {}
    for wrapper in list(_known) if _known else ():  # an empty set takes longer to walk than to ask
        handle = getattr(wrapper, "_handle", None)
        if handle is None:
            continue
        for number in range(len(handle.flat_param._param_infos)):
            piece = FlatPiece(wrapper, number)
            for module, name in piece.owners:
                pieces[id(module), name] = piece
    return pieces


def find_modules() -> None:
    """Remember every FSDP1 module of this process: one walk over all Python objects."""
    for value in gc.get_objects():
        if issubclass(type(value), FullyShardedDataParallel):
            _known.add(value)


class FlatSource(GradientSource):
    """A flat parameter, for all pieces of it: see managed.[Note: hooks on leaves].

    A rank's piece of its gradient has the runs of its parameters where :attr:`FlatPiece.span` says.

    Args:
        piece: any parameter of the flat one.
    """

    def __init__(self, piece: FlatPiece) -> None:
        self._flat_handle = piece.handle
        shards, *replicas = piece.groups
        super().__init__(piece.handle.flat_param, shards, replicas)

    def pieces(self, gradient: Tensor) -> Tensor:
        num_ranks = self._flat_handle.process_group.size()
        return padded_pieces(gradient, num_ranks, local_slice(self._flat_handle).numel())


def _start_in_flat_parameter(piece: FlatPiece) -> int:
    """Where the whole parameter begins in the whole flat parameter, which has paddings."""
    flat_param = piece.handle.flat_param
    is_padding = flat_param._is_padding_mask
    number = [place for place, padding in enumerate(is_padding) if not padding][piece.number]
    return sum(flat_param._numels_with_padding[:number])


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
