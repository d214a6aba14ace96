"""The work of a call grows with the number of parameters, and no faster.

Work is counted in bytecodes that Python executes, which do not depend on the machine: a walk over
all parameters inside a loop over all parameters shows.
"""

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import distprune as prune
from distprune.testing import run_ranks


class Layers(nn.Module):
    """Many layers with one small weight each."""

    def __init__(self, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 2, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers])


def wrapped(kind: str, num_layers: int) -> Layers:
    torch.manual_seed(0)  # ranks with a plain model are replicas
    model = Layers(num_layers)
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    elif kind == "tp":
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.layers:
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, [Shard(0)]))
    return model


def work(fn: Callable[[], object]) -> int:
    """How many bytecodes a call executes, in this thread."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fn()
    finally:
        sys.settrace(before)
    return count


def work_of_everything(kind: str, num_layers: int) -> dict[str, int]:
    model = wrapped(kind, num_layers)
    selected = prune.select(model)
    pruner = prune.schedule.ScheduledPruner(selected, prune.schedule.OneShot(2, 0.5))

    def prune_all() -> None:
        prune.global_unstructured(selected, prune.RandomUnstructured, amount=0.25)

    def remove_all() -> None:
        for module, name in selected:
            prune.remove(module, name)

    steps = {
        "select": lambda: prune.select(model),
        "first pruning": prune_all,
        "second pruning": prune_all,
        "a step that is not due": pruner.step,
        "another one": pruner.step,
        "a due step": pruner.step,
        "is_pruned": lambda: prune.is_pruned(model.layers[0]),
        "first forward": lambda: model(torch.ones(1, 4)) if kind != "tp" else None,
        "remove": remove_all,
    }
    return {what: work(step) for what, step in steps.items()}


def work_of_sizes(kind: str, sizes: list[int]) -> list[dict[str, int]]:
    work_of_everything(kind, 2)  # imports and caches
    return [work_of_everything(kind, size) for size in sizes]


@pytest.mark.parametrize("kind", ["plain", "fsdp2", pytest.param("tp", marks=pytest.mark.thorough)])
def test_work_is_linear_in_the_number_of_parameters(kind):
    for small, medium, large in run_ranks(work_of_sizes, 2, kind, [3, 9, 27]):
        assert small["another one"] == large["another one"] < 500  # a step that is not due
        for what in small:
            first, second = medium[what] - small[what], large[what] - medium[what]
            # 3 where it is linear, 9 where it is quadratic.
            assert second <= 4 * max(first, 100), (what, small[what], medium[what], large[what])
