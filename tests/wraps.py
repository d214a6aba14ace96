"""Every way to shard a model, and which elements of each parameter that leaves on a rank.

A wrapping is written "kind-mesh", e.g. "fsdp2-3" or "hsdp-2x2"; the mesh gives the world size.
"""

import copy
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from models import EVEN, EVEN_HIDDEN, UNEVEN, fqns

REPLICATED = [f"{kind}-{size}" for kind in ("plain", "ddp") for size in (1, 2, 3, 4)]
FSDP2 = [f"fsdp2-{size}" for size in (1, 2, 3, 4)]
FSDP2_ROOT = [f"fsdp2_root-{size}" for size in (1, 2, 3, 4)]
FSDP2_DIM1 = [f"fsdp2_dim1-{size}" for size in (1, 2, 3, 4)]  # needs models.EVEN sizes
HSDP = [f"hsdp-{mesh}" for mesh in ("1x2", "2x1", "1x3", "3x1", "2x2")]
TP = [f"tp-{size}" for size in (1, 2, 3, 4)]
FSDP2_TP = [f"fsdp2_tp-{mesh}" for mesh in ("1x2", "2x1", "1x3", "3x1", "2x2")]
SHARDED = FSDP2 + FSDP2_ROOT + HSDP + TP + FSDP2_TP  # any sizes
ALL = REPLICATED + SHARDED
TRAINED = ALL  # the support matrix: see distributed/test_matrix.py


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
            return DistributedDataParallel(model)
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
        case "tp":
            return _parallelize(model, init_device_mesh("cpu", shape))
        case "fsdp2_tp":
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
            return _fully_shard(_parallelize(model, mesh["tp"]), mesh["dp"], **fsdp_options)
    raise ValueError(f"no such wrapping: {wrapping!r}")


def _fully_shard(model: nn.Module, mesh, **options) -> nn.Module:
    for layer in model.children():
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _parallelize(model: nn.Module, mesh) -> nn.Module:
    return parallelize_module(model, mesh, {"l1": ColwiseParallel(), "l2": RowwiseParallel()})


def unwrapped(model: nn.Module) -> nn.Module:
    """The module whose parameter names are those of the model before wrapping."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def local(tensor: Tensor) -> Tensor:
    """What this rank holds."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def local_indices(model: nn.Module, wrapping: str) -> dict[str, Tensor]:
    """For each parameter of an unwrapped model, the row-major indices that this rank will hold.

    A copy of the model is filled with the index of each element and wrapped: then
    what a rank holds *is* the list of its indices. float64 counts exactly to 2^53.
    """
    model = copy.deepcopy(model).double()
    names = fqns(model)
    for parameter in model.parameters():
        parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    model = unwrapped(wrap(model, wrapping))
    return {name: local(model.get_parameter(name)).long() for name in names}


def my_part(full: Tensor, indices: Tensor) -> Tensor:
    """The elements of a full tensor that this rank holds, in the shape of its shard."""
    return full.reshape(-1)[indices]


def runnable_sizes(wrapping: str) -> tuple[int, int, int, int]:
    """Sizes of a Net whose forward torch can run under this wrapping: as uneven as that allows."""
    kind = kind_of(wrapping)
    if kind in ("tp", "fsdp2_tp"):
        return EVEN_HIDDEN
    return EVEN if kind == "fsdp2_dim1" else UNEVEN


def data_rank(wrapping: str) -> tuple[int, int]:
    """Which of how many parts of a batch this rank trains on; ranks of a TP group share one.

    Ranks with a plain model each train on all of it, and so stay replicas.
    """
    kind, shape = kind_of(wrapping), mesh_shape(wrapping)
    if kind in ("plain", "tp"):
        return 0, 1
    if kind == "fsdp2_tp":
        return dist.get_rank() // shape[1], shape[0]
    return dist.get_rank(), world_size(wrapping)
