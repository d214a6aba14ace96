"""A pruned model is freed like a dense one; pruning it again and again leaves nothing behind."""

import gc
import types
import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.models import Net, seeded
from helpers.sampling import every


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


@pytest.mark.parametrize(
    ("wrapping", "removed"),
    [
        (wrapping, removed)
        for turn, wrapping in enumerate(GROWTH_WRAPPINGS)
        for removed in every(2, [False, True], turn)
    ],
)
def test_nothing_grows_over_many_prunings(wrapping, removed):
    for grown in run_ranks(growth, wrappings.world_size(wrapping), wrapping, removed):
        assert grown == {}
