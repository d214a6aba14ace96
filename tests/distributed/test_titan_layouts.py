"""The layouts of torchtitan, rebuilt on gloo: its trainer needs a GPU.

Of a mixture it shards the experts on a mesh (efsdp, ep) and all else on (fsdp,), in one group of
FSDP2 or in two; experts are cut along dimension 1 where there are more ranks than experts.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard, distribute_tensor

import distprune as prune
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
            mask, held = (local(getattr(model, name + end)) for end in ("_mask", "_orig"))
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
