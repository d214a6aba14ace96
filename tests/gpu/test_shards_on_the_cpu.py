"""Policies that keep shards on the CPU: refused by name under FSDP2, and applied under FSDP1."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    OffloadPolicy,
    fully_shard,
)

import distprune
from helpers.on_ranks import on_ranks

pytestmark = pytest.mark.gpu

NUM_WEIGHTS = 24 * 33 + 33 * 8


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 33), nn.ReLU(), nn.Linear(33, 8))


def prune_fsdp2(device, is_offloaded):
    """The error, how many elements are pruned, and whether all values are as they were."""
    model = network() if is_offloaded else network().to(device)
    policy = CPUOffloadPolicy(pin_memory=False) if is_offloaded else OffloadPolicy()
    fully_shard(model, mesh=init_device_mesh(device.type, (1,)), offload_policy=policy)
    before = {name: value.to_local().clone() for name, value in model.state_dict().items()}
    targets, error, zeros = distprune.select(model, everything=True), "", 0
    try:
        distprune.global_unstructured(targets, distprune.L1Unstructured, amount=0.5)
        zeros = sum(int((~module.weight_mask.to_local()).sum()) for module, _ in targets)
    except NotImplementedError as raised:
        error = str(raised)
    after = {name: value.to_local() for name, value in model.state_dict().items()}
    is_same = list(after) == list(before) and all(map(torch.equal, after.values(), before.values()))
    return error, zeros, is_same


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_fsdp2(device, is_offloaded):
    ((error, zeros, is_same),) = on_ranks(prune_fsdp2, 1, device, is_offloaded, device=device.type)
    if is_offloaded and device.type != "cpu":
        assert "CPUOffloadPolicy" in error and is_same
    else:
        assert (error, zeros) == ("", NUM_WEIGHTS // 2)


def mask_of(module, name):
    return getattr(module, f"{name}_mask").view(-1)


def of_all_ranks(number):
    numbers = torch.tensor(number)
    dist.all_reduce(numbers)
    return int(numbers)


def train_fsdp1(device, dtype):
    """Two prunings, each with a step after it; the end of pruning."""
    model = FullyShardedDataParallel(
        network(),
        device_id=device,
        use_orig_params=True,
        cpu_offload=CPUOffload(offload_params=device.type != "cpu"),
        mixed_precision=MixedPrecision(param_dtype=dtype) if dtype else None,
    )
    targets = distprune.select(model, everything=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(1)).to(device)
    # The masks of the second pruning are made after FSDP1 has moved those of the first.
    for amount in (0.5, 0.3):
        distprune.global_unstructured(targets, distprune.L1Unstructured, amount=amount)
        before = [getattr(*target).detach().clone() for target in targets]
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        num_trained = 0
        for target, old in zip(targets, before, strict=True):
            mask = mask_of(*target).to(old.device)
            differs = getattr(*target).detach().view(-1) != old.view(-1)
            assert not (differs & ~mask).any()
            num_trained += int((differs & mask).sum())
        assert of_all_ranks(num_trained) > 0
    for target in targets:
        assert not getattr(*target).detach().cpu().view(-1)[~mask_of(*target).cpu()].any()
    first = NUM_WEIGHTS // 2
    expected = first + round(0.3 * (NUM_WEIGHTS - first))
    assert of_all_ranks(sum(int((~mask_of(*target)).sum()) for target in targets)) == expected
    distprune.verify(model)
    for target in targets:
        distprune.remove(*target)
    assert of_all_ranks(sum(int((getattr(*t) == 0).sum()) for t in targets)) == expected
    model(x)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_fsdp1(device, dtype):
    on_ranks(train_fsdp1, 2, device, dtype, device=device.type)
