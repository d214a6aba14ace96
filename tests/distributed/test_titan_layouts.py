"""The layouts of torchtitan, rebuilt on gloo: its trainer needs a GPU.

Of a mixture it shards the experts on a mesh (efsdp, ep) and all else on (fsdp,), in one group of
FSDP2 or in two; experts are cut along dimension 1 where there are more ranks than experts.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

import distprune as prune
from distprune.criteria import Fisher
from distprune.testing import run_ranks
from helpers import reference
from helpers.comparisons import assert_nothing_wrong
from helpers.wrappings import local

NAMES = ["experts", "dense"]
NUM_STEPS = 10


class Layer(nn.Module):
    """Experts [4, 6, 5] and a matrix [7, 3]; the loss draws the masked weights to targets."""

    def __init__(self, values: list[Tensor]):
        super().__init__()
        self.experts, self.dense = map(nn.Parameter, values)

    def forward(self, targets: list[Tensor]) -> Tensor:
        held = [w.to_local() if hasattr(w, "to_local") else w for w in (self.experts, self.dense)]
        return sum((w - t).square().sum() for w, t in zip(held, targets, strict=True))


def whole(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((4, 6, 5), (7, 3))]


def wrapped(model: Layer, layout: str) -> DeviceMesh:
    """Shard a layer over 4 ranks, in place; returns the mesh of the ranks that divide experts."""
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    names = ("dp_replicate", "efsdp", "ep")
    sizes = (2, 1, 2) if layout == "replicas" else (1, 2, 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    experts = distribute_tensor(model.experts.detach(), mesh["ep"], [Shard(0)])
    model.experts = nn.Parameter(experts)
    if layout == "replicas":
        fully_shard(model, mesh=mesh["dp_replicate", "efsdp"])
        return mesh["ep"]
    on_efsdp = _fsdp_common.FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0)
    dim = 1 if layout == "dimension 1" else 0

    def place(parameter: nn.Parameter) -> Any:
        if parameter is not model.experts:
            return None
        return _fsdp_common.ShardPlacementResult(placement=Shard(dim), mesh_info=on_efsdp)

    fully_shard(model, mesh=world, shard_placement_fn=place)
    return mesh["ep"]


def differences(layout: str) -> list[str]:
    values, targets = whole(0), whole(1)
    indices = Layer([torch.arange(v.numel()).view(v.shape).float() for v in values])
    wrapped(indices, layout)
    indices = [local(getattr(indices, name)).long() for name in NAMES]
    model = Layer(values)
    ep = wrapped(model, layout)
    mine = [targets[0].chunk(2)[ep.get_local_rank()], targets[1]]
    wrong: list[str] = []
    keeps = None
    values = [value.clone() for value in values]
    optimizer = torch.optim.SGD(model.parameters(), 0.05, foreach=False)
    for step in range(NUM_STEPS):
        if step in (0, 5):
            keeps = reference.prune(values, 0.4, keeps)
            pairs = [(model, name) for name in NAMES]
            prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.4)
        model(mine).backward()
        optimizer.step()
        optimizer.zero_grad()
        for number, (name, index) in enumerate(zip(NAMES, indices, strict=True)):
            value, keep = values[number], keeps[number]
            value -= 0.05 * 2 * (value * keep - targets[number]) * keep
            value *= keep
            mask, held = local(getattr(model, name + "_mask")), local(getattr(model, name))
            if not torch.equal(mask, keep.view(-1)[index]):
                wrong.append(f"step {step}: the mask of {name}")
            if not torch.allclose(held, value.view(-1)[index], rtol=0, atol=1e-6):
                wrong.append(f"step {step}: {name}")
    prune.verify(model)
    for name in NAMES:
        prune.remove(model, name)
    dist.barrier()
    return wrong


@pytest.mark.parametrize("layout", ["dimension 0", "dimension 1", "replicas"])
def test_ten_steps_of_titans_layouts_equal_one_process(layout):
    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        pytest.skip("in this torch a group of FSDP2 has one mesh")
    assert_nothing_wrong(run_ranks(differences, 4, layout))


def simple_fsdp(model: nn.Module, mesh: DeviceMesh, placements: list[Placement]) -> nn.Module:
    """Parameters as DTensors, gathered by properties of the modules, as SimpleFSDP does."""

    def gathered(parameter: DTensor) -> Tensor:
        whole = parameter.redistribute(placements=[Replicate()] * mesh.ndim)
        return whole.to_local(grad_placements=[Partial()] * mesh.ndim)

    for module in model.modules():
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        for name in names:
            shards = distribute_tensor(module._parameters[name].detach(), mesh, placements)
            module._parameters[name] = nn.Parameter(shards)
        properties = {
            name: property(lambda self, name=name: gathered(self._parameters[name]))
            for name in names
        }
        module.__class__ = type(f"Simple{type(module).__name__}", (type(module),), properties)
    return model


def train_simple_fsdp(mode: str) -> list[str]:
    sizes = (2, 2) if mode == "hybrid" else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", sizes)
    kinds = {"shard": [Shard(0)], "replicate": [Replicate()], "hybrid": [Replicate(), Shard(0)]}
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    model = simple_fsdp(copy.deepcopy(dense), mesh, kinds[mode])
    indices = [
        local(distribute_tensor(torch.arange(w.numel()).view(w.shape), mesh, kinds[mode]))
        for w in (dense[0].weight, dense[2].weight)
    ]
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, foreach=False) for m in (model, dense)]
    batches = torch.randn(NUM_STEPS, dist.get_world_size(), 2, 5)
    dist.broadcast(batches, 0)
    keeps, wrong = None, []
    fisher = Fisher(prune.select(model), unit="rank_batch")
    with pytest.raises(NotImplementedError, match="in a property"), fisher.calibrating():
        pass
    for step, batch in enumerate(batches):
        if step in (2, 6):
            keeps = reference.prune([dense[n].weight.detach() for n in (0, 2)], 0.4, keeps)
            prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.4)
        for number, keep in zip((0, 2), keeps or (), strict=bool(keeps)):
            dense[number].weight.data.mul_(keep)
        model(batch[dist.get_rank()]).square().sum().backward()
        dense(batch.flatten(0, 1)).square().sum().backward()
        for number, keep in zip((0, 2), keeps or (), strict=bool(keeps)):
            dense[number].weight.grad.mul_(keep)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for number, mine, keep in zip((0, 2), indices, keeps or (), strict=bool(keeps)):
            if not torch.equal(local(model[number].weight_mask), keep.view(-1)[mine]):
                wrong.append(f"step {step}: mask of {number}")
            if not torch.allclose(
                model[number].weight, dense[number].weight * keep, rtol=0, atol=1e-5
            ):
                wrong.append(f"step {step}: weight of {number}")
    prune.verify(model)
    prune.remove(model[0], "weight")
    if bool(local(model[0]._parameters["weight"])[~keeps[0].view(-1)[indices[0]]].any()):
        wrong.append("remove left no zeros")
    model(batches[0][0])
    return wrong


@pytest.mark.parametrize(
    ("mode", "world_size"),
    [*(("shard", size) for size in (1, 2, 3, 4)), ("replicate", 2), ("hybrid", 4)],
)
def test_simple_fsdp(mode, world_size):
    assert_nothing_wrong(run_ranks(train_simple_fsdp, world_size, mode))
