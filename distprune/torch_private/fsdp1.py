"""FSDP1 (``FullyShardedDataParallel``): the only file that knows its private fields.

FSDP1 joins the parameters of a wrapped module into one flat parameter and gives each rank an
even slice of it, so a rank holds a *run* of a parameter's elements, in the order of its memory.
How a mask acts on it: fsdp1_mask.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel

from distprune.torch_private import live_graphs, private_fields
from distprune.torch_private.errors import backward_to_come
from distprune.torch_private.fsdp1_mask import FlatMask, is_summoned, local_slice

_MANAGED = "_fsdp_flattened"

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
    """One parameter inside a flat parameter; a torch_private.wrapper.Managed.

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
        if is_summoned(handle):
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
        return local_slice(self.handle)[offset : offset + size]

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
        num_ranks = math.prod(group.size() for group in self.groups)
        return f"FSDP1 {self.state.sharding_strategy.name} over {num_ranks} ranks"

    def check_fields(self) -> None:
        """Raise NotImplementedError naming the private fields that this torch lacks."""
        handle = self.handle
        objects = {"FullyShardedDataParallel": self.state, "FlatParamHandle": handle}
        private_fields.check("FSDP1", objects | {"FlatParameter": handle.flat_param})

    def reshard(self) -> None:
        """Free the gathered copy if there is one: after evaluation the root keeps its own.

        Raises:
            RuntimeError: a backward is still to come, for which it is gathered, or will be.
        """
        self._check_no_backward()
        self.free_gathered()

    def _check_no_backward(self) -> None:
        if live_graphs.reaches(self.handle.flat_param):
            raise backward_to_come(*self.owners[0])

    def free_gathered(self) -> None:
        """Free the gathered copy if there is one, whatever is to come."""
        handle = self.handle
        is_initialized = hasattr(handle.flat_param, "_local_shard")
        if is_initialized:
            handle.reshard(free_unsharded_flat_param=not handle.needs_unshard())
            handle.post_reshard()

    def has_registered(self, module: nn.Module, name: str) -> bool:
        """Whether what a module has under a name is this parameter, or a view that FSDP1 made."""
        registered, flat_param = module._parameters.get(name), self.handle.flat_param
        if registered is None:  # without use_orig_params, or gathered
            return isinstance(module.__dict__.get(name), Tensor)
        lists = (getattr(flat_param, each, None) for each in ("_params", "_shared_params"))
        return any(registered is each for found in lists for each in found or ())

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
        self._check_no_backward()
        self.values.copy_(values)

    def masked_by(self, mask: Tensor) -> FlatMask:
        """What lets a mask, this rank's run of it, act on the parameter."""
        return FlatMask(self)


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
