"""FSDP2 gathers on streams of its own: what forward and backward see of weights, under stress.

Each layer compares, on the device and without waiting, the weight that it is called with, in
forward and again in backward, with the product of a copy of the weight and a copy of the mask. Both
copies go through the same changes, on the default stream: weights and masks are written in place.
Long kernels hold the default stream up in front of each change, and memory is allocated, filled
with NaN and freed all the while. So a stream that does not wait, or memory that is used again too
early, is seen.
"""

import pytest
import torch
import torch.distributed as dist
from sharded_on_device import prune, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from helpers.on_ranks import on_ranks

pytestmark = pytest.mark.gpu

NUM_LAYERS = 8


class Watched(torch.autograd.Function):
    """A linear layer that compares its weight with the expected one when it is used."""

    @staticmethod
    def forward(ctx, x, weight, expected, wrong):
        ctx.save_for_backward(x, weight)
        ctx.expected, ctx.wrong = expected, wrong
        wrong[0] += (weight != expected).sum()
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        ctx.wrong[1] += (weight != ctx.expected).sum()
        return gradient @ weight, gradient.t() @ x, None, None


class Layer(nn.Module):
    """Attributes: ``expected`` and ``wrong``, which are no part of the model's state."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.expected = self.wrong = torch.empty(0)

    def forward(self, x):
        for size in (x.shape[-1] ** 2, x.numel()):  # memory as a layer takes it, and gives it back
            torch.full((size,), torch.nan, device=x.device, dtype=x.dtype)
        return torch.tanh(Watched.apply(x, self.weight, self.expected, self.wrong))


@torch.no_grad()
def change(layer, weights, masks, number, step, is_planted):
    """Change a shard and, in every second step, its mask; and the copies of the whole as well."""
    factor = (0.75, 1.0, 1.25)[(step + number) % 3]
    layer.weight.to_local().mul_(factor)
    weights[number].mul_(factor)
    if step % 2:  # a column goes, for good: a shard has zeros under its mask
        layer.weight_mask.to_local()[:, step] = False
        if not is_planted:
            masks[number] = masks[number].clone()
            masks[number][:, step] = False


def stress(device, dtype, width, steps, is_planted):
    """How many elements are wrong in forwards, in backwards, and in gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(width) for _ in range(NUM_LAYERS))).to(device)
    weights = [layer.weight.detach().clone() for layer in model]
    size, rank = dist.get_world_size(), dist.get_rank()
    options = {
        "mesh": init_device_mesh(device.type, (size,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype),
    }
    for layer in (*model, model):
        fully_shard(layer, **options)
    prune(model)
    masks = [whole(layer.weight_mask).clone() for layer in model]
    wrong = torch.zeros(3, dtype=torch.int64, device=device)
    for layer in model:
        layer.wrong = wrong
    for step in range(steps):
        if device.type == "cuda":
            torch.cuda._sleep(2_000_000)
        for number, layer in enumerate(model):
            change(layer, weights, masks, number, step, is_planted)
            layer.expected = (weights[number] * masks[number]).to(dtype or torch.float32)
        x = torch.randn(32, width, device=device)
        model(x).float().square().mean().backward()
        for number, layer in enumerate(model):
            rows = masks[number].chunk(size)[rank]
            gradient = layer.weight.grad.to_local()
            wrong[2] += (gradient.masked_fill(rows, 0) != 0).sum()  # does not wait
        model.zero_grad()
    return wrong.tolist()


@pytest.mark.parametrize(("size", "dtype"), [(1, None), (1, torch.bfloat16), (2, torch.bfloat16)])
def test_weights_in_forward_and_backward(device, is_small, size, dtype):
    width, steps = (64, 3) if is_small else (2048, 100 if size == 1 else 20)
    found = on_ranks(stress, size, device, dtype, width, steps, False, device=device.type)
    assert found == [[0, 0, 0]] * size


def test_a_defect_is_seen(device):
    """Masks that change without their copies: the comparison must find it."""
    ((forward, backward, _),) = on_ranks(stress, 1, device, None, 64, 2, True, device=device.type)
    assert forward > 0 and backward > 0
