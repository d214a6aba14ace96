"""A pruned model is freed like a dense one; pruning it again and again leaves nothing behind."""

import gc
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.models import Net, seeded
from helpers.sampling import on_each


def freed(wrapping: str, removed: bool) -> list[bool]:
    watched = watch_a_pruned_model(wrapping, removed)
    gc.collect()
    return [reference() is None for reference in watched]


def watch_a_pruned_model(wrapping: str, removed: bool) -> list[weakref.ref]:
    torch.manual_seed(0)
    model = wrappings.wrap(Net(), wrapping)
    targets = prune.select(model)
    prune.global_unstructured(targets, prune.L1Unstructured, amount=0.5)
    prune.global_unstructured(targets, prune.L1Unstructured, amount=0.5)
    if removed:
        for module, name in targets:
            prune.remove(module, name)
    inner = wrappings.unwrapped(model)
    return [weakref.ref(inner), *(weakref.ref(parameter) for parameter in inner.parameters())]


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize(
    "wrapping", ["plain-2", "fsdp2-2", "hsdp-1x2", "tp-2", "fsdp2_tp-2x2", "fsdp1-2"]
)
def test_a_pruned_model_is_freed(wrapping, removed):
    for flags in run_ranks(freed, wrappings.world_size(wrapping), wrapping, removed):
        assert all(flags), flags


def living() -> Counter:
    """What pruning makes and could forget, by kind."""
    dist.barrier()
    gc.collect()
    counts: Counter = Counter()
    for each in gc.get_objects():
        kind = type(each)
        if issubclass(kind, torch.Tensor):
            counts["tensors"] += 1
        elif issubclass(kind, type):
            counts["classes"] += 1
        elif issubclass(kind, types.FunctionType | types.MethodType):
            counts["functions"] += 1
        elif kind.__module__.startswith(("distprune", "torch")):
            counts[kind.__qualname__] += 1
    counts["process groups"] = len(dist.distributed_c10d._world.pg_map)
    return counts


def growth(wrapping: str, removed: bool) -> dict[str, tuple[int, int]]:
    """What there is more or less of after 15 more prunings than around the first ones."""
    model = wrappings.wrap(seeded(Net(wrappings.runnable_sizes(wrapping))), wrapping)
    targets = prune.select(model)
    module, name = targets[0]

    def prune_and_run() -> None:
        prune.global_unstructured(targets, prune.L1Unstructured, amount=0.02)
        prune.set_masks(targets, prune.get_masks(targets))
        with torch.no_grad():
            model(torch.ones(2, wrappings.runnable_sizes(wrapping)[0]))
        if removed:
            prune.l1_unstructured(module, name, 1)
            for each in targets:
                prune.remove(*each)

    def fewest_living(num_rounds: int) -> Counter:
        """Over some rounds: a backend's threads hold what they sent last for a moment longer."""
        fewest = None
        for _ in range(num_rounds):
            prune_and_run()
            counts = living()
            fewest = counts if fewest is None else fewest & counts
        return fewest

    for _ in range(3):  # from the second pruning on there are containers
        prune_and_run()
    early = fewest_living(5)
    for _ in range(10):
        prune_and_run()
    late = fewest_living(5)
    return {kind: (early[kind], late[kind]) for kind in early | late if early[kind] != late[kind]}


GROWTH_WRAPPINGS = ["plain-1", "ddp-2", "fsdp2-2", "tp-2", "fsdp2_tp-2x2", "fsdp1-2"]


@pytest.mark.parametrize(("wrapping", "removed"), on_each(GROWTH_WRAPPINGS, 2, [False, True]))
def test_nothing_grows_over_many_prunings(wrapping, removed):
    for grown in run_ranks(growth, wrappings.world_size(wrapping), wrapping, removed):
        assert grown == {}


# The work of a call grows with the number of parameters, and no faster.


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
