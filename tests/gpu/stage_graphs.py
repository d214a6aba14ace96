"""A pruned model in CUDA graphs: replays see the weights and masks of their time.

On a CPU, which has no graphs, the same functions are called again instead of replayed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from stage import NotTried, Stage, main, prune
from torch import Tensor, nn


def network(stage: Stage) -> tuple[nn.Sequential, Tensor]:
    """A pruned model and its input."""
    width = 16 if stage.quick else 1024
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    model.to(stage.device)
    prune(model)
    return model, torch.randn(8, width, device=stage.device)


def captured(stage: Stage, work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """What runs the work again, and the tensor that it writes its result to."""
    if stage.device.type == "cpu":
        out = work().detach().clone()
        return lambda: out.copy_(work().detach()), out
    if stage.device.type != "cuda":
        raise NotTried("CUDA has graphs")
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
def change(model: nn.Sequential) -> None:
    """Other weights, and other masks, in the same memory."""
    for layer in (model[0], model[2]):
        layer.weight_orig.mul_(1.5)
        layer.weight_mask.copy_(1 - layer.weight_mask)


def forward(stage: Stage) -> None:
    model, x = network(stage)
    with torch.no_grad():
        replay, out = captured(stage, lambda: model(x))
        for number in range(3):
            expected = model(x)
            replay()
            same = torch.equal(out, expected)
            stage.check(f"replay {number} equals a call, bit for bit", same)
            before = out.clone()
            change(model)
            replay()
            stage.check(f"replay {number} sees the change", not torch.equal(out, before))


def forward_and_backward(stage: Stage) -> None:
    model, x = network(stage)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def work() -> Tensor:
        for parameter in model.parameters():
            parameter.grad.zero_()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    replay, loss = captured(stage, work)
    for number in range(3):
        replay()
        found = [loss.clone(), *(p.grad.clone() for p in model.parameters())]
        expected = work()
        wanted = [expected.detach(), *(p.grad.clone() for p in model.parameters())]
        same = all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        stage.check(f"loss and gradients of replay {number} equal those of a call", same)
        for layer in (model[0], model[2]):
            wrong = int((layer.weight_orig.grad[layer.weight_mask == 0] != 0).sum())
            stage.check("no pruned element has a gradient", wrong == 0, f"{wrong} have one")
        change(model)


def compiled_with_graphs(stage: Stage) -> None:
    """torch.compile, mode reduce-overhead: its own graphs."""
    if stage.device.type == "cpu":
        raise NotTried("a CPU has no graphs")
    model, x = network(stage)
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        for number in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            out, expected = compiled(x).clone(), model(x)
            off = float((out - expected).abs().max() / expected.abs().max())
            # Fused kernels may round otherwise; another mask would be far off.
            stage.check(f"call {number}", off < 1e-2, f"off by {off:.2g} of the largest")
            change(model)


def pruned_after_capture(stage: Stage) -> None:
    """A further pruning writes new masks: a graph from before keeps the old ones, and is old."""
    model, x = network(stage)
    with torch.no_grad():
        replay, out = captured(stage, lambda: model(x))
        old = model(x)
        prune(model)
        new = model(x)
        replay()
        stage.check("the pruning changed the output", not torch.equal(old, new))
        sees = "the new masks" if torch.equal(out, new) else "the old masks"
        sees = sees if torch.equal(out, new) or torch.equal(out, old) else "neither"
        stage.say(f"a replay after a further pruning has {sees}")
        replay, out = captured(stage, lambda: model(x))
        replay()
        stage.check("a new capture has the new masks", torch.equal(out, new))


if __name__ == "__main__":
    # A capture that fails leaves its process unable to draw random numbers.
    main(forward, forward_and_backward, pruned_after_capture, compiled_with_graphs, apart=True)
