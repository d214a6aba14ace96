"""FSDP2's bf16 policy: bit for bit what one process computes with bf16(orig * mask)."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy

import distprune as prune
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong_on, wrong_masks
from helpers.models import Net, fill, fqns, target
from helpers.training_pair import OPTIMIZERS

NAMES = ["l1.weight", "l2.weight", "l3.weight", "l2.bias"]


NUM_STEPS = 10


def differences(wrapping: str) -> list[str]:
    return [f"{name}: {each}" for name in OPTIMIZERS for each in differences_with(wrapping, name)]


def differences_with(wrapping: str, optimizer_name: str) -> list[str]:
    """Pruned twice. One batch on every rank: the mean of 2 or 4 equal gradients is exact."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    dense = fill(Net(), "normal", "float32")
    indices = wrappings.local_indices(dense, wrapping)
    model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping, mp_policy=policy)
    kind, options = OPTIMIZERS[optimizer_name]
    optimizers = [kind(m.parameters(), **options) for m in (model, dense)]
    targets = [target(model, name) for name in NAMES]
    keeps: dict[str, torch.Tensor] = {}
    wrong: list[str] = []
    half = Net().bfloat16()
    generator = torch.Generator().manual_seed(1)
    for step in range(NUM_STEPS):
        if step in (0, 6):
            scores = [dense.get_parameter(name) for name in NAMES]
            new = reference.prune(scores, 0.4, list(keeps.values()) or None)
            keeps = dict(zip(NAMES, new, strict=True))
            prune.global_unstructured(targets, prune.L1Unstructured, amount=0.4)
            wrong += wrong_masks(model, keeps, indices)
        x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
        out, expected = model(x), bf16_forward(half, dense, keeps, x)
        F.mse_loss(out.float(), y).backward()
        F.mse_loss(expected.float(), y).backward()
        if not torch.equal(out, expected):
            wrong.append(f"step {step}: outputs off by {(out - expected).abs().max():.3g}")
        for name in fqns(dense):
            keep = keeps.get(name, torch.ones(()))
            dense.get_parameter(name).grad = half.get_parameter(name).grad.float() * keep
        for name in fqns(dense):
            sharded = model.get_parameter(name + "_orig" if name in keeps else name)
            gradient = wrappings.my_part(dense.get_parameter(name).grad, indices[name])
            if not torch.equal(wrappings.local(sharded.grad), gradient):
                wrong.append(f"step {step}: gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name in fqns(dense):
            sharded = model.get_parameter(name + "_orig" if name in keeps else name)
            value = wrappings.my_part(dense.get_parameter(name).detach(), indices[name])
            if not torch.equal(wrappings.local(sharded), value):
                wrong.append(f"step {step}: {name} after the update")
    return wrong


def bf16_forward(half: Net, dense: Net, keeps: dict, x: torch.Tensor) -> torch.Tensor:
    """The dense model with its masked parameters rounded to bf16, as one process would run it."""
    half.zero_grad()
    for name in fqns(dense):
        effective = dense.get_parameter(name).detach() * keeps.get(name, torch.ones(()))
        half.get_parameter(name).data.copy_(effective)
    return half(x.bfloat16())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "wrapping", ["fsdp2-1", "fsdp2-2", "fsdp2-4", "fsdp2_root-2", "hsdp-2x2", "hsdp-1x2"]
)
def test_bf16_policy_is_bit_exact(wrapping):
    assert_nothing_wrong_on(wrapping, differences)
