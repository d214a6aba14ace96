"""prune.dense_gradients on plain modules: other layers, tied weights, copies, and refusals."""

import copy
import pickle

import pytest
import torch
from torch import nn

import distprune as prune


def pruned_linear() -> nn.Linear:
    layer = nn.Linear(4, 3)
    prune.custom_from_mask(layer, "weight", torch.tensor([[1.0, 0, 1, 0]] * 3))
    return layer


def test_attention_whose_out_proj_is_never_called():
    attention = nn.MultiheadAttention(4, 2, dropout=0.0)
    prune.l1_unstructured(attention.out_proj, "weight", 0.5)
    prune.l1_unstructured(attention, "in_proj_weight", 0.5)
    x = torch.randn(3, 1, 4)
    with prune.dense_gradients(attention):
        attention(x, x, x)[0].square().sum().backward()
        found = {name: p.grad.clone() for name, p in attention.named_parameters()}
    for name in ("out_proj.weight_orig", "in_proj_weight_orig"):
        mask = attention.get_buffer(name.replace("_orig", "_mask"))
        assert found[name][mask == 0].count_nonzero() > 0
        assert torch.equal(attention.get_parameter(name).grad, found[name] * mask)


def test_infinite_values_are_masked_as_outside():
    """orig + (masked - orig).detach() would give other bits, and NaN here."""
    layer = pruned_linear()
    layer.weight_orig.data[0, 0], layer.weight_orig.data[0, 1] = 1e30, float("inf")
    x = torch.ones(1, 4)
    outside = layer(x)
    with prune.dense_gradients(layer):
        inside = layer(x)
    assert torch.equal(inside.isnan(), outside.isnan())
    assert torch.equal(inside.nan_to_num(), outside.nan_to_num())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_in_no_context(copied):
    layer = pruned_linear()
    with prune.dense_gradients(layer):
        other = copied(layer)
    x = torch.randn(2, 4)
    other(x).sum().backward()
    assert other.weight_orig.grad[other.weight_mask == 0].count_nonzero() == 0
    with prune.dense_gradients(other):
        other(x).sum().backward()
        assert other.weight_orig.grad[other.weight_mask == 0].count_nonzero() > 0


def test_pruning_and_removing_inside():
    layer, other = pruned_linear(), nn.Linear(4, 3)
    with prune.dense_gradients([(layer, "weight"), (other, "weight")]):
        (layer(torch.ones(1, 4)) + other(torch.ones(1, 4))).sum().backward()
        prune.l1_unstructured(layer, "weight", 2)
    assert layer.weight_orig.grad[layer.weight_mask == 0].count_nonzero() == 0
    assert layer.weight_orig.grad[layer.weight_mask == 1].count_nonzero() == 4
    assert other.weight.grad.count_nonzero() == 12
    layer.zero_grad()
    with prune.dense_gradients(layer):
        layer(torch.ones(1, 4)).sum().backward()
        prune.remove(layer, "weight")
    assert layer.weight.grad.count_nonzero() == 12


class OwnMask(prune.L1Unstructured):
    def apply_mask(self, module):
        return super().apply_mask(module) * 2


def test_what_is_refused():
    layer = nn.Linear(4, 3)
    OwnMask.apply(layer, "weight", amount=2)
    with (
        pytest.raises(NotImplementedError, match=r"Linear\.weight: OwnMask defines apply_mask"),
        prune.dense_gradients(layer),
    ):
        pass
    layer(torch.ones(1, 4)).sum().backward()
    with (
        pytest.raises(TypeError, match=r"parameters\[0\] is a Parameter"),
        prune.dense_gradients(layer.parameters()),
    ):
        pass
