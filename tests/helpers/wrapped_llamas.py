"""A Llama wrapped by torch's own means, for tests of language models on several ranks."""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

_PLAN = {
    "q_proj": ColwiseParallel, "k_proj": ColwiseParallel, "v_proj": ColwiseParallel,
    "o_proj": RowwiseParallel, "gate_proj": ColwiseParallel, "up_proj": ColwiseParallel,
    "down_proj": RowwiseParallel,
}  # fmt: skip


def wrapped_llama(model: nn.Module, wrapping: str) -> nn.Module:
    """Shard a Llama over all ranks: "none", "ddp-2", "fsdp2-4", "tp-2" or "fsdp2_tp-2x2"."""
    kind, _, shape = wrapping.partition("-")
    sizes = tuple(map(int, shape.split("x"))) if shape else ()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "none":
        return model
    names = {"fsdp2": ("dp",), "tp": ("tp",), "fsdp2_tp": ("dp", "tp")}[kind]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    layers = model.model.layers
    if "tp" in names:
        for layer in layers:
            plan = {name: name.rpartition(".")[2] for name, _ in layer.named_modules()}
            plan = {name: _PLAN[last]() for name, last in plan.items() if last in _PLAN}
            parallelize_module(layer, mesh["tp"], plan)
    if "dp" in names:
        for layer in layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model
