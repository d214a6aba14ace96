"""FSDP1 (``FullyShardedDataParallel``): its record of a parameter, in its private fields.

FSDP1 joins the parameters of a wrapped module into one flat parameter and gives each rank an
even slice of it, so a rank has a *run* of a parameter's elements, in the order of its memory:

    parameters     | a a a a a a a | b b b b b b b b b b | c c c |
    flat parameter | a a a a a a a   b b b b b b b b b b   c c c | padding |
    slices         |   rank 0    |    rank 1   |   rank 2   |   rank 3     |

How a mask acts on it, and masks in state dicts: fsdp1_mask.
"""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState

from distprune.wrappers import private_fields
from distprune.wrappers.managed import GradientSource, ManagedRun, padded_pieces

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

    def rename(self, old: str, new: str) -> None:
        flat_param = self.handle.flat_param
        infos, fqns = list(flat_param._param_infos), list(flat_param._fqns)
        info = infos[self.number]
        shared = []
        for other in flat_param._shared_param_infos:
            if other.prim_module is info.module and other.prim_param_name == old:
                name = new if other.param_name == old else other.param_name
                other = other._replace(param_name=name, prim_param_name=new)
            shared.append(other)
        infos[self.number] = info._replace(param_name=new)
        fqns[self.number] = fqns[self.number].removesuffix(old) + new
        flat_param._param_infos, flat_param._fqns = tuple(infos), tuple(fqns)
        flat_param._shared_param_infos = tuple(shared)

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


def is_summoned(handle: FlatParamHandle) -> bool:
    """Whether FSDP1 has gathered the flat parameter for state_dict or summon_full_params."""
    return handle._training_state == HandleTrainingState.SUMMON_FULL_PARAMS


def local_slice(handle: FlatParamHandle) -> Tensor:
    """This rank's slice of the flat parameter, unmasked and in full precision."""
    flat_param: Tensor = handle.flat_param
    local: Tensor = getattr(flat_param, "_local_shard", flat_param)
    return local.detach()


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
