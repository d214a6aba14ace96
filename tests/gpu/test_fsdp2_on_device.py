"""A training step under FSDP2 is that of a dense model with the same zeros."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sharded_on_device import prune, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from helpers.on_ranks import on_ranks

pytestmark = pytest.mark.gpu


def make(device, width, dtype, is_compiled):
    """Blocks of an MLP each, under FSDP2."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                      nn.Linear(4 * width, width))
        for _ in range(4)
    ]  # fmt: skip
    model = nn.Sequential(*blocks, nn.Linear(width, 33)).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    if is_compiled:
        for block in model:
            block.compile(backend="eager" if device.type == "cpu" else "inductor")
    return model


def trained_loss(model, x):
    """The loss of a forward that has a backward: without, a compiler may fuse otherwise."""
    loss = F.cross_entropy(model(x).float(), torch.zeros(len(x), dtype=torch.long, device=x.device))
    loss.backward()
    return loss.item()


def masked(model):
    return [module for module in model.modules() if "weight_mask" in module._buffers]


def gathered(model):
    """The weights that each module sees, and its mask, on every rank."""
    for block in model:
        block.unshard()
        for module in block.modules():
            weight = getattr(module, "weight", None)
            if weight is not None and not isinstance(weight, DTensor):
                mask = module._buffers.get("weight_mask")
                yield weight.detach().clone(), None if mask is None else whole(mask)
        block.reshard()


@contextlib.contextmanager
def zeros_of(pruned, dense):
    """Give a dense model the zeros of the pruned one for a while."""
    names = {module: name for name, module in pruned.named_modules()}
    saved = []
    for module in masked(pruned):
        weight = dense.get_submodule(names[module]).weight.detach().to_local()
        saved.append((weight, weight.clone()))
        weight.mul_(module.weight_mask.to_local())
    yield
    for weight, values in saved:
        weight.copy_(values)


def train(device, width, dtype, is_compiled):
    dense, pruned = (make(device, width, dtype, is_compiled) for _ in range(2))
    prune(pruned)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(64, width, generator=generator).to(device)
    without_zeros = trained_loss(dense, x)
    with zeros_of(pruned, dense):
        expected, again = (trained_loss(dense, x) for _ in range(2))
        pairs = list(zip(gathered(pruned), gathered(dense), strict=True))
        assert len(pairs) == 13
        assert all(torch.equal(mine, theirs) for (mine, _), (theirs, _) in pairs)
    # Equal, but for what the dense model differs by from itself: kernels may add in any order.
    allowed = 4 * abs(expected - again)
    if is_compiled:  # apart, which may round otherwise; without the mask it would be far off
        allowed = max(allowed, 0.1 * abs(expected - without_zeros))
    assert abs(trained_loss(pruned, x) - expected) <= allowed
    for module in masked(pruned):
        assert not module.weight.grad.to_local()[~module.weight_mask.to_local()].any()
    optimizer = torch.optim.AdamW(pruned.parameters(), fused=True)
    for _ in range(3):
        optimizer.step()
        trained_loss(pruned, x)
    masks = [(weight, mask) for weight, mask in gathered(pruned) if mask is not None]
    assert len(masks) == 9 and not any(weight[~mask].any() for weight, mask in masks)


@pytest.mark.parametrize(
    ("size", "dtype", "is_compiled"),
    [(1, None, False), (1, torch.bfloat16, False), (1, torch.bfloat16, True),
     (2, torch.bfloat16, False)],
)  # fmt: skip
def test_a_step_is_that_of_a_dense_model_with_zeros(device, is_small, size, dtype, is_compiled):
    width = 32 if is_small else 1024
    on_ranks(train, size, device, width, dtype, is_compiled, device=device.type)
