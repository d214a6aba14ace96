"""What FSDP gathers, and the gradient it leaves, have the bits of one process with zeros.

With -0.0, NaN and infinities, which become +0 under the mask, and with a float16 policy, where a
pruned weight would overflow if it were rounded before it is zeroed.
"""

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune as torch_prune
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

import distprune as prune
from distprune.base.naming import named_modules
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong_on
from helpers.models import Net, fill

SPECIAL = [-0.0, 0.0, torch.nan, torch.inf, -torch.inf, 1e30, -7e4, 1e-40, -1e-40]
POLICIES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INTEGERS = {2: torch.int16, 4: torch.int32}
LAYERS = ["l1", "l2", "l3"]


class Side(Net):
    """Each layer has an input of its own, so that no NaN of one reaches another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outs = [layer(x[:, : layer.in_features]) for layer in (self.l1, self.l2, self.l3)]
        return sum(out.sum() for out in outs)


def build(sizes: tuple[int, int, int, int]) -> Side:
    model = fill(Side(sizes), "normal", "float32")
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in (model.l1, model.l2, model.l3):
            chosen = torch.randint(len(SPECIAL), layer.weight.shape, generator=generator)
            is_special = torch.rand(layer.weight.shape, generator=generator) < 0.5
            layer.weight[is_special] = torch.tensor(SPECIAL)[chosen][is_special]
    return model


def masks_of(model: Side) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.rand(model.get_submodule(name).weight.shape, generator=generator) < 0.5
        for name in LAYERS
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().contiguous()
    return tensor.view(INTEGERS[tensor.element_size()])


def one_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.where(~tensor.isnan(), torch.nan)


def differences(wrapping: str, policy: str) -> list[str]:
    dtype, options = POLICIES[policy], {}
    if policy != "float32":
        is_fsdp1 = wrappings.kind_of(wrapping).startswith("fsdp1")
        key = "mixed_precision" if is_fsdp1 else "mp_policy"
        kind = MixedPrecision if is_fsdp1 else MixedPrecisionPolicy
        options[key] = kind(param_dtype=dtype, reduce_dtype=torch.float32)
    sizes = wrappings.runnable_sizes(wrapping)
    dense, model = build(sizes), wrappings.wrap(build(sizes), wrapping, **options)
    ordinary = fill(Side(sizes), "normal", "float32")
    indices = wrappings.local_indices(ordinary, wrapping, **options)
    modules = dict(named_modules(model))
    gathered = {}
    for name, mask in masks_of(dense).items():
        torch_prune.custom_from_mask(dense.get_submodule(name), "weight", mask)
        prune.custom_from_mask(modules[name], "weight", mask)
        modules[name].register_forward_pre_hook(
            lambda module, _, name=name: gathered.update({name: module.weight.detach().clone()})
        )
    # One batch on every rank: the mean of 2 or 4 equal gradients is exact.
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(4, max(dense.l1.in_features, dense.l2.in_features), generator=generator)
    x[1, 2], x[2, 3], x[3, 1] = torch.inf, -0.0, torch.nan  # and so are the gradients' columns
    model(x).backward()
    wrong = []
    for name in LAYERS:
        layer = dense.get_submodule(name)
        pruned = layer.weight_mask == 0
        expected = layer.weight_orig.detach().masked_fill(pruned, 0).to(dtype)
        if not torch.equal(bits(gathered[name]), bits(expected)):
            wrong.append(f"gathered {name}.weight")
        # As one process computes it: the gradient of the rounded weight, then the mask.
        weight = expected.requires_grad_()
        F.linear(x[:, : layer.in_features].to(dtype), weight).sum().backward()
        masked = weight.grad.float().masked_fill(pruned, 0)
        found = wrappings.gradient(model, f"{name}.weight", indices)
        part = wrappings.my_part(masked, indices[f"{name}.weight"])
        # The sum over the ranks may turn a NaN into another one.
        if not torch.equal(bits(one_nan(found)), bits(one_nan(part))):
            wrong.append(f"gradient of {name}.weight")
    return wrong


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "wrapping",
    [
        *["fsdp2-1", "fsdp2-2", "fsdp2-4", "fsdp2_root-2", "fsdp2_dim1-2", "hsdp-2x2"],
        *["fsdp1-2", "fsdp1_root-2", "fsdp1_flat-2", "fsdp1_hybrid-2x2"],
    ],
)
def test_weights_and_gradients_have_the_bits_of_one_process(wrapping, policy):
    assert_nothing_wrong_on(wrapping, differences, policy)
