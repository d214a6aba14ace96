"""The node that accumulates a gradient is made anew in each forward, as in a dense model.

It belongs to the stream on which it was made: see masked_value.release_graph. The meta device
stands for a GPU where there is none. A node's metadata, by which it is known again, live as long as
the node does.
"""

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

import distprune as prune

SHAPE = (6, 4)


@pytest.fixture
def device(device):
    return torch.device("meta") if device.type == "cpu" else device


def pruned(device, make=lambda: nn.Linear(*SHAPE[::-1]), name="weight"):
    module = make()
    prune.l1_unstructured(module, name, amount=0.5)
    module.to(device)
    # A mask does not follow its parameter to the meta device, where it would lose its values.
    module._buffers[name + "_mask"] = getattr(module, name + "_mask").to(device)
    return module


def node_of(parameter):
    (function, _), *_ = parameter.expand_as(parameter).grad_fn.next_functions
    assert function.variable is parameter
    return function


def step(module, x):
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    out.sum().backward()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.Linear(4, 6), "weight"),
        (lambda: nn.LSTM(4, 6), "weight_hh_l0"),  # keeps a list of its weights
    ],
)
def test_each_forward_has_a_node_of_its_own(make, name, device):
    module = pruned(device, make, name)
    x = torch.randn(3, 4, device=device)
    for _ in range(3):
        step(module, x)
        node_of(getattr(module, name + "_orig")).metadata["is old"] = True
        step(module, x)
        assert "is old" not in node_of(getattr(module, name + "_orig")).metadata


def test_the_weight_has_a_graph_after_forward_and_stays_when_the_product_fails(device):
    module = pruned(device)
    x = torch.randn(3, 4, device=device)
    module(x)
    before = module.weight
    assert before.requires_grad and before.grad_fn is not None
    mask, module.weight_mask = module.weight_mask, torch.ones(5, 7, device=device)
    with pytest.raises(RuntimeError, match="broadcast"):
        module(x)
    assert module.weight.shape == SHAPE and not module.weight.requires_grad
    assert before.requires_grad  # whoever holds it can still use its graph
    before.sum().backward()
    module.weight_mask = mask
    module(x)
    assert module.weight.requires_grad


def test_a_value_that_a_vmapped_forward_left_is_replaced(device):
    module = pruned(device)
    x = torch.randn(3, 4, device=device)
    stacked = {name: torch.stack([p, p]) for name, p in module.named_parameters()}
    vmap(lambda parameters: functional_call(module, parameters, (x,)))(stacked)
    step(module, x)
    assert module.weight.shape == SHAPE
