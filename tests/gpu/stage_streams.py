"""FSDP2 gathers on streams of its own: what forward and backward see of weights, under stress.

Each layer compares, on the device and without waiting, the weight that it is called with, in
forward and again in backward, with the product of a copy of the weight and a copy of the mask. Both
copies go through the same changes, on the default stream: weights and masks are written in place.
Long kernels hold the default stream up in front of each change, and memory is allocated, filled
with NaN and freed all the while. So a stream that does not wait, or memory that is used again too
early, is seen.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from on_ranks import Crash, run_on_ranks, whole
from stage import NotTried, Stage, main, prune
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

NUM_LAYERS = 8
# Masks that change together with their copies; without them; and no masks.
PRUNED, PLANTED, DENSE = "pruned", "planted", "dense"


def one_rank(stage: Stage) -> None:
    measure(stage, 1, None)


def one_rank_bf16_policy(stage: Stage) -> None:
    measure(stage, 1, torch.bfloat16)


def two_ranks_over_gloo(stage: Stage) -> None:
    measure(stage, 2, torch.bfloat16)


def a_defect_is_seen(stage: Stage) -> None:
    """Masks that change without their copies: the comparison must find it."""
    found = run_on_ranks(stress, 1, stage.device, None, 64, 2, PLANTED)[0]
    stage.check("a planted defect is found", found["forward"] > 0 and found["backward"] > 0)


def measure(stage: Stage, size: int, dtype: torch.dtype | None) -> None:
    width, steps = (64, 3) if stage.quick else (2048, 100 if size == 1 else 20)
    try:
        found = run_on_ranks(stress, size, stage.device, dtype, width, steps, PRUNED)
    except Crash as crash:
        # The control: what becomes of a dense model that goes through the same.
        try:
            run_on_ranks(stress, size, stage.device, dtype, width, steps, DENSE)
        except Crash as other:
            raise NotTried(f"torch crashes here, with a dense model too: {other}") from crash
        stage.say("a dense model goes through the same without a crash")
        raise
    for rank, each in enumerate(found):
        stage.say(f"rank {rank}: {each['compared']} weights of {width} x {width} compared")
        for where in ("forward", "backward"):
            stage.check(f"rank {rank}: weights in {where}", each[where] == 0, f"{each[where]}")
        wrong = each["gradients"]
        stage.check(f"rank {rank}: gradients of pruned elements are 0", wrong == 0, f"{wrong}")


class Watched(torch.autograd.Function):
    """A linear layer that compares its weight with the expected one when it is used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, expected: Tensor, wrong: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.expected, ctx.wrong = expected, wrong
        wrong[0] += (weight != expected).sum()
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.wrong[1] += (weight != ctx.expected).sum()
        return gradient @ weight, gradient.t() @ x, None, None


class Layer(nn.Module):
    """Attributes: ``expected`` and ``wrong``, which are no part of the model's state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.expected = self.wrong = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        garbage(x)
        return torch.tanh(Watched.apply(x, self.weight, self.expected, self.wrong))


def garbage(like: Tensor) -> None:
    """Take memory as a layer does, write NaN to it, and give it back."""
    for size in (like.shape[-1] ** 2, like.numel()):
        torch.full((size,), torch.nan, device=like.device, dtype=like.dtype)


def hold_up(device: torch.device) -> None:
    """Keep the current stream busy for a millisecond or so."""
    if device.type == "cuda":
        torch.cuda._sleep(2_000_000)


def parameter(layer: nn.Module, kind: str) -> nn.Parameter:
    found: nn.Parameter = getattr(layer, "weight_orig", layer.weight)
    return found


@torch.no_grad()
def change(
    layer: nn.Module, weights: list[Tensor], masks: list[Tensor], number: int, step: int, kind: str
) -> None:  # fmt: skip
    """Change a shard and, in every second step, its mask; and the copies of the whole as well."""
    factor = (0.75, 1.0, 1.25)[(step + number) % 3]
    parameter(layer, kind).to_local().mul_(factor)
    weights[number].mul_(factor)
    if step % 2 and kind != DENSE:
        places = torch.arange(weights[number].size(1), device=weights[number].device)
        flip = places % (2 + step % 5) == 0
        layer.weight_mask.to_local().logical_xor_(flip)
        if kind != PLANTED:
            masks[number] = masks[number] ^ flip


def stress(
    device: torch.device, dtype: torch.dtype | None, width: int, steps: int, kind: str
) -> dict[str, int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(width) for _ in range(NUM_LAYERS))).to(device)
    weights = [layer.weight.detach().clone() for layer in model]
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if kind == DENSE:
        masks = [torch.ones_like(weight, dtype=torch.bool) for weight in weights]
    else:
        prune(model)
        masks = [whole(layer.weight_mask).clone() for layer in model]
    wrong = torch.zeros(3, dtype=torch.int64, device=device)
    for layer in model:
        layer.wrong = wrong
    size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(steps):
        hold_up(device)
        for number, layer in enumerate(model):
            change(layer, weights, masks, number, step, kind)
            product = weights[number] * masks[number]
            layer.expected = product if dtype is None else product.to(dtype)
        x = torch.randn(32, width, device=device)
        model(x).float().square().mean().backward()
        for number, layer in enumerate(model):
            rows = masks[number].chunk(size)[rank]
            gradient = parameter(layer, kind).grad.to_local()
            wrong[2] += (gradient.masked_fill(rows, 0) != 0).sum()  # does not wait
        model.zero_grad()
    forward, backward, gradients = wrong.tolist()
    return {
        "forward": forward, "backward": backward, "compared": 2 * steps * NUM_LAYERS,
        "gradients": 0 if kind == PLANTED else gradients,
    }  # fmt: skip


if __name__ == "__main__":
    main(a_defect_is_seen, one_rank, one_rank_bf16_policy, two_ranks_over_gloo)
