"""A pruned model in CUDA graphs: replays see the weights and masks of their time.

On a CPU, which has no graphs, the same functions are called again instead of replayed.
"""

import pytest
import torch
from sharded_on_device import prune
from torch import nn

from helpers.on_ranks import on_ranks

pytestmark = pytest.mark.gpu


def network(device):
    """A pruned model and its input."""
    width = 16 if device.type == "cpu" else 1024
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(device)
    prune(model)
    return model, torch.randn(8, width, device=device)


def captured(device, work):
    """What runs the work again, and the tensor that it writes its result to."""
    if device.type == "cpu":
        out = work().detach().clone()
        return lambda: out.copy_(work().detach()), out
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work().detach()
    return graph.replay, out


@torch.no_grad()
def change(model):
    """Other weights, and other masks, in the same memory."""
    for layer in (model[0], model[2]):
        layer.weight_orig.mul_(1.5)
        layer.weight_mask.copy_(1 - layer.weight_mask)


@torch.no_grad()
def forward(device):
    model, x = network(device)
    replay, out = captured(device, lambda: model(x))
    for _ in range(3):
        expected = model(x)
        replay()
        assert torch.equal(out, expected)
        before = out.clone()
        change(model)
        replay()
        assert not torch.equal(out, before)


def forward_and_backward(device):
    model, x = network(device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def work():
        for parameter in model.parameters():
            parameter.grad.zero_()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    def gradients():
        return [parameter.grad.clone() for parameter in model.parameters()]

    replay, loss = captured(device, work)
    for _ in range(3):
        replay()
        found = [loss.clone(), *gradients()]
        expected = [work().detach(), *gradients()]
        assert all(map(torch.equal, found, expected))
        for layer in (model[0], model[2]):
            assert not layer.weight_orig.grad[layer.weight_mask == 0].any()
        change(model)


@torch.no_grad()
def compiled_with_graphs(device):
    """torch.compile, mode reduce-overhead: its own graphs."""
    model, x = network(device)
    compiled = torch.compile(model, mode="reduce-overhead")
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        out, expected = compiled(x).clone(), model(x)
        # Fused kernels may round otherwise; another mask would be far off.
        assert (out - expected).abs().max() < 1e-2 * expected.abs().max()
        change(model)


@pytest.mark.parametrize("work", [forward, forward_and_backward, compiled_with_graphs])
def test_replays(device, work):
    if work is compiled_with_graphs and device.type == "cpu":
        pytest.skip("a CPU has no graphs")
    # A capture that fails leaves its process unable to draw random numbers.
    on_ranks(work, 1, device, device=device.type)
