"""Methods with an ``apply_mask`` of their own, and modules that torch has pruned already."""

from __future__ import annotations

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from equal_modules import fill_distinct
from torch import nn

import distprune as prune

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


def damping(library):
    class Damped(library.L1Unstructured):
        def apply_mask(self, module: nn.Module) -> torch.Tensor:
            mask = getattr(module, self._tensor_name + "_mask")
            return getattr(module, self._tensor_name + "_orig") * (mask + 0.1 * (1 - mask))

    return Damped


def linear() -> nn.Linear:
    return fill_distinct(nn.Linear(6, 5), torch.float32, 0)


def test_remove_keeps_what_a_method_makes_of_its_mask():
    mine, of_torch = linear(), linear()
    damping(prune).apply(mine, "weight", 0.5)
    damping(torch_prune).apply(of_torch, "weight", 0.5)
    output = mine(X)
    assert torch.equal(output, of_torch(X))
    prune.remove(mine, "weight")
    torch_prune.remove(of_torch, "weight")
    assert torch.equal(mine(X), output)
    assert torch.equal(mine.weight, of_torch.weight)


def test_remove_of_a_container_multiplies_as_in_torch():
    mine, of_torch = linear(), linear()
    for library, module in ((prune, mine), (torch_prune, of_torch)):
        damping(library).apply(module, "weight", 0.3)
        library.l1_unstructured(module, "weight", 0.3)
    assert torch.equal(mine(X), of_torch(X))
    prune.remove(mine, "weight")
    torch_prune.remove(of_torch, "weight")
    assert torch.equal(mine.weight, of_torch.weight)


CALLS = {
    "single": lambda module: prune.l1_unstructured(module, "weight", 0.5),
    "global": lambda module: prune.global_unstructured(
        [(module, "weight")], prune.L1Unstructured, amount=0.5
    ),
    "identity": lambda module: prune.identity(module, "weight"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_parameter_that_torch_has_pruned_is_refused(call):
    module = torch_prune.l1_unstructured(linear(), "weight", 0.3)
    output, state = module(X), {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(ValueError, match=r"Linear\.weight was pruned by torch\.nn\.utils\.prune"):
        CALLS[call](module)
    assert list(module.state_dict()) == list(state)
    assert all(torch.equal(module.state_dict()[key], state[key]) for key in state)
    assert torch.equal(module(X), output)
    prune.l1_unstructured(module, "bias", 0.5)  # another parameter of the same module


def test_the_way_out_takes_the_mask_over():
    module = torch_prune.l1_unstructured(linear(), "weight", 0.3)
    output = module(X)
    mask = module.weight_mask
    torch_prune.remove(module, "weight")
    prune.custom_from_mask(module, "weight", mask)
    assert torch.equal(module(X), output)
    prune.l1_unstructured(module, "weight", 4)
    assert int((module.weight == 0).sum()) == round(0.3 * 30) + 4
    prune.remove(module, "weight")
    module(X)
