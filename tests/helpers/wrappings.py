"""Every way to wrap a model, and the indices of the elements that each rank then holds.

A wrapping is written "kind-mesh", e.g. "fsdp2-3" or "hsdp-2x2"; the mesh gives the world size.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from helpers.models import EVEN, EVEN_HIDDEN, UNEVEN, fqns
from helpers.sampling import THOROUGH

REPLICATED = [f"{kind}-{size}" for kind in ("plain", "ddp") for size in (1, 2, 3, 4)]
FSDP2 = [f"fsdp2-{size}" for size in (1, 2, 3, 4)]
FSDP2_ROOT = [f"fsdp2_root-{size}" for size in (1, 2, 3, 4)]
FSDP2_DIM1 = [f"fsdp2_dim1-{size}" for size in (1, 2, 3, 4)]  # needs models.EVEN sizes
HSDP = [f"hsdp-{mesh}" for mesh in ("1x2", "2x1", "1x3", "3x1", "2x2")]
FSDP1 = ["fsdp1-2", "fsdp1-3", "fsdp1-4"]  # one flat parameter per layer
FSDP1_ROOT = ["fsdp1_root-2", "fsdp1_root-3"]  # one flat parameter, layers cut anywhere
FSDP1_FLAT = ["fsdp1_flat-2", "fsdp1_flat-4"]  # use_orig_params=False
TP = [f"tp-{size}" for size in (1, 2, 3, 4)]
FSDP2_TP = [f"fsdp2_tp-{mesh}" for mesh in ("1x2", "2x1", "1x3", "3x1", "2x2")]
ANY_FSDP1 = ["fsdp1-2", "fsdp1-3", "fsdp1_root-3", "fsdp1_flat-2", "fsdp1_hybrid-2x2"]
SHARDED = ANY_FSDP1 + FSDP2 + FSDP2_ROOT + HSDP + TP + FSDP2_TP  # any sizes
ALL = REPLICATED + SHARDED
# Where criteria and statistics are compared.
TRAINED = [*ALL, *(w for w in FSDP1 + FSDP1_ROOT + FSDP1_FLAT if w not in ALL)]
# The support matrix of distributed/test_training.py; integrations/test_deepspeed.py wraps its own.
MATRIX = [
    *TRAINED,
    *(f"replicate-{size}" for size in (1, 2, 3, 4)),
    *(f"fsdp2_replicate-{size}" for size in (2, 3, 4)),
]
# Every kind once, with even or uneven shards, and one process: see sampled.
_SAMPLE = {
    "plain-2", "ddp-3", "fsdp1-2", "fsdp1_root-3", "fsdp1_flat-2", "fsdp1_hybrid-2x2", "fsdp2-1",
    "fsdp2-3", "fsdp2_root-2", "fsdp2_dim1-3", "hsdp-2x2", "tp-3", "fsdp2_tp-2x2",
}  # fmt: skip


def sampled(names: list[str]) -> list[str]:
    """Return the wrappings of a list that run by default in tests of one property."""
    return [name for name in names if THOROUGH or name in _SAMPLE]


def kind_of(wrapping: str) -> str:
    return wrapping.split("-")[0]


def mesh_shape(wrapping: str) -> tuple[int, ...]:
    return tuple(int(size) for size in wrapping.split("-")[1].split("x"))


def world_size(wrapping: str) -> int:
    return math.prod(mesh_shape(wrapping))


def wrap(model: nn.Module, wrapping: str, **fsdp_options) -> nn.Module:
    """Shard a models.Net, or one with its three layers, over all ranks; in place but for DDP."""
    kind, shape = kind_of(wrapping), mesh_shape(wrapping)
    match kind:
        case "plain":
            return model
        case "ddp":
            return DistributedDataParallel(model, **fsdp_options)
        case "fsdp2":
            return _fully_shard(model, init_device_mesh("cpu", shape), **fsdp_options)
        case "fsdp2_root":
            return fully_shard(model, mesh=init_device_mesh("cpu", shape), **fsdp_options)
        case "fsdp2_dim1":
            return _fully_shard(
                model,
                init_device_mesh("cpu", shape),
                shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None,
                **fsdp_options,
            )
        case "hsdp":
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            return _fully_shard(model, mesh, **fsdp_options)
        case "replicate" | "fsdp2_replicate":
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate",))
            layers = [model.l2] if kind == "fsdp2_replicate" else [*model.children(), model]
            for layer in layers:
                replicate(layer, mesh=mesh)
            return model if kind == "replicate" else _fully_shard(model, mesh, **fsdp_options)
        case "fsdp1" | "fsdp1_root" | "fsdp1_flat" | "fsdp1_hybrid":
            return _fsdp1(model, kind, shape, **fsdp_options)
        case "tp":
            return _parallelize(model, init_device_mesh("cpu", shape))
        case "fsdp2_tp":
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
            return _fully_shard(_parallelize(model, mesh["tp"]), mesh["dp"], **fsdp_options)
    raise ValueError(f"no such wrapping: {wrapping!r}")


def sharing_meshes(function: Callable) -> Callable:
    """A function in which wrap makes each mesh once: its groups take longer than most calls."""

    @functools.wraps(function)
    def sharing(*args, **kwargs):
        with mock.patch(f"{__name__}.init_device_mesh", functools.cache(init_device_mesh)):
            return function(*args, **kwargs)

    return sharing


def _fully_shard(model: nn.Module, mesh, **options) -> nn.Module:
    for layer in model.children():
        if next(layer.parameters(), None) is not None and not isinstance(layer, FSDPModule):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _fsdp1(model: nn.Module, kind: str, shape: tuple[int, ...], **options) -> nn.Module:
    options = {"use_orig_params": kind != "fsdp1_flat", **options}
    if kind == "fsdp1_hybrid":
        names = ("replicate", "shard")
        options["device_mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    if kind != "fsdp1_root":
        # The norm of a ShapesNet stays with the root, but for _chunks_of_flat_parameters.
        layers = {nn.Linear, nn.Conv2d} | ({nn.LayerNorm} if kind == "fsdp1_flat" else set())
        options["auto_wrap_policy"] = ModuleWrapPolicy(layers)
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def _parallelize(model: nn.Module, mesh) -> nn.Module:
    return parallelize_module(model, mesh, {"l1": ColwiseParallel(), "l2": RowwiseParallel()})


def unwrapped(model: nn.Module) -> nn.Module:
    """The module whose parameter names are those of the model before wrapping."""
    wrappers = (DistributedDataParallel, FullyShardedDataParallel)
    return model.module if isinstance(model, wrappers) else model


def local(tensor: Tensor) -> Tensor:
    """The tensor that this rank holds."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor of all ranks that hold parts of it. Collective."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(wrapping: str, name: str) -> bool:
    """Whether zeros are held in a parameter of a Net: tensor parallelism leaves l3 plain."""
    kind = kind_of(wrapping)
    return name.startswith(("l1.", "l2.")) if kind == "tp" else kind not in ("plain", "ddp")


def stored(module: nn.Module, name: str) -> Tensor:
    """The parameter that a module registers: ``name_orig`` of a pruned plain one, else ``name``."""
    return getattr(module, name + "_orig" if hasattr(module, name + "_orig") else name)


def shard(
    model: nn.Module, name: str, indices: dict[str, Tensor], as_dtensor: bool = False
) -> Tensor:
    """This rank's part of a parameter, pruned or not, to read and to write.

    Args:
        indices: from local_indices.
        as_dtensor: as a DTensor, if the parameter is one.
    """
    path, _, parameter = name.rpartition(".")
    module = unwrapped(model).get_submodule(path)
    if kept_by_name(module):
        held = stored(module, parameter).detach()
        return held if as_dtensor else local(held)
    flat = module._handle.flat_param
    return _piece_of_flat(getattr(flat, "_local_shard", flat).detach(), name, indices)


def gradient(model: nn.Module, name: str, indices: dict[str, Tensor]) -> Tensor:
    """This rank's part of a gradient, laid out like its parameter."""
    path, _, parameter = name.rpartition(".")
    module = unwrapped(model).get_submodule(path)
    if not kept_by_name(module):
        return _piece_of_flat(module._handle.flat_param.grad, name, indices)
    parameter = stored(module, parameter)
    if isinstance(parameter, DTensor):
        return local(parameter.grad.redistribute(placements=parameter.placements))
    if not parameter.numel():  # FSDP1 makes no gradient of what it has not
        return torch.zeros_like(parameter)
    return parameter.grad


def kept_by_name(module: nn.Module) -> bool:
    """Whether a module has its parameters as attributes; FSDP1 without use_orig_params has none."""
    return not isinstance(module, FullyShardedDataParallel) or module._use_orig_params


def _piece_of_flat(flat: Tensor, name: str, indices: dict[str, Tensor]) -> Tensor:
    """Cut a parameter out of FSDP1's flat parameter, which has those of a layer in a row."""
    layer = name.rpartition(".")[0]
    siblings = [other for other in indices if other.rpartition(".")[0] == layer]
    sizes = [len(indices[other]) for other in siblings]
    return flat[: sum(sizes)].split(sizes)[siblings.index(name)]


@torch.no_grad()
def local_indices(model: nn.Module, wrapping: str, **fsdp_options) -> dict[str, Tensor]:
    """Row-major indices of the elements that this rank will hold of each parameter of a model.

    A copy of the model is filled with the index of each element and wrapped, so that
    the values of a shard are its indices. float64 counts exactly to 2^53; FSDP1 cuts
    by bytes, so there the model keeps its dtypes and the digits of an index go one by one.
    """
    if kind_of(wrapping) == "fsdp1_flat":
        return _chunks_of_flat_parameters(model, wrapping)
    if kind_of(wrapping).startswith("fsdp1"):
        low, high = (
            _held(model, wrapping, lambda i, place=place: i // place % 128, **fsdp_options)
            for place in (1, 128)
        )
        return {name: low[name] + 128 * high[name] for name in low}
    return _held(copy.deepcopy(model).double(), wrapping, lambda index: index)


def _held(
    model: nn.Module, wrapping: str, digit: Callable[[Tensor], Tensor], **fsdp_options
) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    names = fqns(model)
    for parameter in model.parameters():
        parameter.copy_(digit(torch.arange(parameter.numel())).view(parameter.shape))
    model = wrap(model, wrapping, **fsdp_options)
    held = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in model.named_parameters()}
    held = {name.removeprefix("module."): p for name, p in held.items()}
    return {name: local(held[name]).long() for name in names}


def _chunks_of_flat_parameters(model: nn.Module, wrapping: str) -> dict[str, Tensor]:
    """What FSDP1 does without use_orig_params: a layer's parameters in a row, cut evenly."""
    model = copy.deepcopy(model).double()
    size, rank, indices = world_size(wrapping), dist.get_rank(), {}
    for prefix, layer in model.named_children():
        names, flat = fqns(layer), []
        for which, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
            in_memory = torch.as_strided(parameter, (parameter.numel(),), (1,))
            flat += [(which, int(index)) for index in in_memory]
        chunk = -(-len(flat) // size)
        mine = flat[rank * chunk : (rank + 1) * chunk]
        for which, name in enumerate(names):
            indices[f"{prefix}.{name}"] = torch.tensor([i for w, i in mine if w == which]).long()
    return indices


def my_part(full: Tensor, indices: Tensor) -> Tensor:
    """The elements of a full tensor that this rank holds, in the shape of its shard."""
    return full.reshape(-1)[indices]


def runnable_sizes(wrapping: str) -> tuple[int, int, int, int]:
    """The most uneven sizes of a Net that torch can run under a wrapping."""
    kind = kind_of(wrapping)
    if kind in ("tp", "fsdp2_tp"):
        return EVEN_HIDDEN
    return EVEN if kind == "fsdp2_dim1" else UNEVEN


def data_rank(wrapping: str, are_replicas: bool = True) -> tuple[int, int]:
    """(part, number of parts) of a batch for this rank; ranks of a TP group share a part.

    Args:
        are_replicas: ranks with a plain model each train on all of it; else they have parts.
    """
    kind, shape = kind_of(wrapping), mesh_shape(wrapping)
    if kind == "tp" or (kind == "plain" and are_replicas):
        return 0, 1
    if kind == "fsdp2_tp":
        return dist.get_rank() // shape[1], shape[0]
    return dist.get_rank(), world_size(wrapping)


@contextlib.contextmanager
def synchronised(model: nn.Module, sync: bool) -> Iterator[None]:
    """Let backward passes inside reduce gradients, or not, if the wrapper knows the difference."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(sync)
    knows = isinstance(model, DistributedDataParallel | FullyShardedDataParallel)
    with model.no_sync() if knows and not sync else contextlib.nullcontext():
        yield
