"""The layouts of torchtitan, rebuilt on gloo: its trainer needs a GPU.

Of a mixture it shards the experts on a mesh (efsdp, ep) and all else on (fsdp,), in one group of
FSDP2 or in two; experts are cut along dimension 1 where there are more ranks than experts. Its
SimpleFSDP gathers parameters in properties of the modules.
"""

import copy
from collections.abc import Callable
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


def wrong_steps(
    model: nn.Module,
    dense: nn.Module,
    pairs: list,
    wrap: Callable[[nn.Module], Any],
    loss_of: Callable[[nn.Module, int, bool], Tensor],
) -> list[str]:
    """Ten steps of a wrapped model and of one process, with two prunings; then masks come off.

    Args:
        pairs: (module of the wrapped model, module of the dense one, name).
        wrap: shards a model like ``dense`` in place, here one of the indices of its elements.
        loss_of: of a model at a step, whole or of this rank.
    """
    numbered = copy.deepcopy(dense)
    for parameter in numbered.parameters():
        parameter.data = torch.arange(parameter.numel()).view(parameter.shape).float()
    wrap(numbered)
    paths = {id(module): path for path, module in dense.named_modules()}
    held = [numbered.get_submodule(paths[id(own)])._parameters[name] for _, own, name in pairs]
    indices = [local(parameter).long() for parameter in held]
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, foreach=False) for m in (model, dense)]
    values = [own._parameters[name] for _, own, name in pairs]
    keeps, wrong = None, []
    for step in range(10):
        if step in (2, 6):
            keeps = reference.prune([value.detach() for value in values], 0.4, keeps)
            targets = [(module, name) for module, _, name in pairs]
            prune.global_unstructured(targets, prune.L1Unstructured, amount=0.4)
        for value, keep in zip(values, keeps or (), strict=bool(keeps)):
            value.data.mul_(keep)
        loss_of(model, step, False).backward()
        loss_of(dense, step, True).backward()
        for value, keep in zip(values, keeps or (), strict=bool(keeps)):
            value.grad.mul_(keep)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (module, _, name), value, keep, mine in zip(
            pairs, values, keeps or (), indices, strict=bool(keeps)
        ):
            if not torch.equal(local(getattr(module, name + "_mask")), keep.view(-1)[mine]):
                wrong.append(f"step {step}: the mask of {name}")
            own = local(module._parameters[name]) * keep.view(-1)[mine]
            if not torch.allclose(own, (value * keep).view(-1)[mine], rtol=0, atol=1e-5):
                wrong.append(f"step {step}: {name}")
    wrong += map(str, prune.verify(model).problems)
    for (module, _, name), keep, mine in zip(pairs, keeps, indices, strict=True):
        prune.remove(module, name)
        if bool(local(module._parameters[name])[~keep.view(-1)[mine]].any()):
            wrong.append(f"remove left no zeros in {name}")
    dist.barrier()
    return wrong


class Layer(nn.Module):
    """Experts [4, 6, 5] and a matrix [7, 3]; the loss draws the weights to targets."""

    def __init__(self, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.experts = nn.Parameter(torch.randn(4, 6, 5, generator=generator))
        self.dense = nn.Parameter(torch.randn(7, 3, generator=generator))

    def forward(self, targets: list[Tensor]) -> Tensor:
        held = [w.to_local() if hasattr(w, "to_local") else w for w in (self.experts, self.dense)]
        return sum((w - t).square().sum() for w, t in zip(held, targets, strict=True))


def sharded_layer(model: Layer, layout: str) -> DeviceMesh:
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
    model, dense = Layer(), Layer()
    ep = sharded_layer(model, layout)
    whole = [parameter.detach() for parameter in Layer(1).parameters()]
    mine = [whole[0].chunk(2)[ep.get_local_rank()], whole[1]]

    def loss_of(each: Layer, step: int, is_whole: bool) -> Tensor:
        return each(whole if is_whole else mine)

    pairs = [(model, dense, "experts"), (model, dense, "dense")]
    return wrong_steps(model, dense, pairs, lambda m: sharded_layer(m, layout), loss_of)


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


def simple_fsdp_differences(mode: str) -> list[str]:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2) if mode == "hybrid" else (size,))
    kinds = {"shard": [Shard(0)], "replicate": [Replicate()], "hybrid": [Replicate(), Shard(0)]}
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    model = simple_fsdp(copy.deepcopy(dense), mesh, kinds[mode])
    batches = torch.randn(10, size, 2, 5)
    fisher = Fisher(prune.select(model), unit="rank_batch")
    with pytest.raises(NotImplementedError, match="in a property"), fisher.calibrating():
        pass

    def loss_of(each: nn.Module, step: int, is_whole: bool) -> Tensor:
        batch = batches[step]
        return each(batch.flatten(0, 1) if is_whole else batch[dist.get_rank()]).square().sum()

    pairs = [(model[i], dense[i], "weight") for i in (0, 2)]
    wrap = lambda m: simple_fsdp(m, mesh, kinds[mode])  # noqa: E731
    return wrong_steps(model, dense, pairs, wrap, loss_of)


@pytest.mark.parametrize(
    ("mode", "world_size"),
    [*(("shard", size) for size in (1, 2, 3, 4)), ("replicate", 2), ("hybrid", 4)],
)
def test_simple_fsdp(mode, world_size):
    assert_nothing_wrong(run_ranks(simple_fsdp_differences, world_size, mode))
