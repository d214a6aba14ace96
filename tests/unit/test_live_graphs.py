"""Which parameters a backward may still reach, beside the cases of test_pruned_before_backward."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from distprune.torch_private import live_graphs
from distprune.torch_private.live_graphs import reaches


@pytest.fixture
def layers():
    return nn.Linear(3, 4), nn.Linear(4, 2)


def forward(layers, rows=2):
    return layers[1](layers[0](torch.ones(rows, 3)).relu()).square().sum()


def reached(layers):
    return [reaches(p) for layer in layers for p in layer.parameters()]


ALL, NONE = [True] * 4, [False] * 4


def test_a_retained_graph_can_be_used_again(layers):
    loss = forward(layers)
    loss.backward(retain_graph=True)
    assert reached(layers) == ALL
    loss.backward()
    assert reached(layers) == NONE


def test_what_was_computed_from_the_outputs_of_a_used_graph(layers):
    output = layers[1](layers[0](torch.ones(2, 3)).relu())
    output.square().sum().backward()
    metric = output.mean() * 2 + output.exp().sum()
    assert reached(layers) == NONE
    assert metric.requires_grad


def test_an_output_in_the_middle_keeps_its_own_part_alive(layers):
    hidden = layers[0](torch.ones(2, 3))
    layers[1](hidden.detach()).sum().backward()
    assert reached(layers) == [True, True, False, False]
    assert hidden.requires_grad


def test_gradient_of_inputs_through_frozen_weights(layers):
    layers[1].requires_grad_(False)
    loss = forward(layers)
    assert reached(layers)[:3] == [True, True, True]
    loss.backward()
    assert reached(layers) == NONE


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_is_not_recomputed(layers, use_reentrant):
    calls = []

    def block(x):
        calls.append(1)
        return layers[0](x).relu()

    x = torch.ones(2, 3, requires_grad=True)
    loss = layers[1](checkpoint(block, x, use_reentrant=use_reentrant)).sum()
    # A reentrant checkpoint has no graph yet: its backward makes one, of the weights it finds.
    inside = not use_reentrant
    assert reached(layers) == [inside, inside, True, True]
    assert calls == [1]
    loss.backward()
    assert reached(layers) == NONE


def test_saved_tensors_are_not_unpacked(layers):
    unpacked = []

    def unpack(packed):
        unpacked.append(1)
        return packed

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        loss = forward(layers)
    assert reached(layers) == ALL and not unpacked
    loss.backward()
    assert unpacked and reached(layers) == NONE


def test_saved_tensors_on_another_device(layers):
    with save_on_cpu():
        loss = forward(layers)
    assert reached(layers) == ALL
    loss.backward()
    assert reached(layers) == NONE


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def test_a_function_of_the_user(layers):
    loss = Twice.apply(torch.ones(2, 3), layers[0].weight).sum()
    assert reached(layers) == [True, False, False, False]
    loss.backward()
    assert reached(layers) == NONE


def test_lists_of_saved_tensors(layers):
    stacked = torch.stack([layers[0].weight, layers[0].weight * 2]).prod(0)
    loss = torch.linalg.multi_dot([stacked, torch.ones(3, 2), torch.ones(2, 2)]).sum()
    assert reached(layers)[0]
    loss.backward()
    assert reached(layers) == NONE


def test_a_view_of_a_parameter_is_no_forward(layers):
    kept = layers[0].weight.view(-1), layers[0].bias[:2]
    assert reached(layers) == NONE
    assert kept[0].requires_grad


def test_a_gradient_penalty(layers):
    x = torch.ones(2, 3, requires_grad=True)
    [gradient] = torch.autograd.grad(layers[0](x).square().sum(), x, create_graph=True)
    assert reached(layers)[0]
    gradient.sum().backward()
    del gradient
    assert reached(layers) == NONE


def test_graphs_are_walked_once_for_a_call(layers, monkeypatch):
    looks, look = [], live_graphs._walk
    monkeypatch.setattr(live_graphs, "_walk", lambda: (looks.append(1), look()))
    monkeypatch.setattr(live_graphs, "_MAX_AGE", float("inf"))  # however slow this machine is
    loss = forward(layers)
    loss.backward()
    for p in (p for layer in layers for p in layer.parameters()):
        assert not reaches(p)
    assert len(looks) == 1
    again = forward(layers)
    assert reached(layers) == ALL
    assert again.requires_grad and loss.requires_grad
