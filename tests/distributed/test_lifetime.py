"""A pruned model is freed like a dense one: the mask on its shards keeps nothing alive."""

import gc
import weakref

import pytest
import torch

import distprune as prune
import wraps
from distprune.testing import run_ranks
from models import Net


def freed(wrapping: str, removed: bool) -> list[bool]:
    watched = watch_a_pruned_model(wrapping, removed)
    gc.collect()
    return [reference() is None for reference in watched]


def watch_a_pruned_model(wrapping: str, removed: bool) -> list[weakref.ref]:
    torch.manual_seed(0)
    model = wraps.wrap(Net(), wrapping)
    targets = prune.select(model)
    prune.global_unstructured(targets, prune.L1Unstructured, amount=0.5)
    prune.global_unstructured(targets, prune.L1Unstructured, amount=0.5)
    if removed:
        for module, name in targets:
            prune.remove(module, name)
    inner = wraps.unwrapped(model)
    return [weakref.ref(inner), *(weakref.ref(parameter) for parameter in inner.parameters())]


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize(
    "wrapping",
    ["plain-2", "fsdp2-2", "hsdp-1x2", "tp-2", "fsdp2_tp-2x2", "fsdp1-2"],
)
def test_a_pruned_model_is_freed(wrapping, removed):
    for flags in run_ranks(freed, wraps.world_size(wrapping), wrapping, removed):
        assert all(flags), flags


def gradient_masks() -> int:
    """How many gradient hooks a parameter has after it was pruned and removed three times."""
    model = wraps.wrap(Net(), "fsdp2-2")
    for _ in range(3):
        prune.l1_unstructured(model.l1, "weight", 0.1)
        prune.l1_unstructured(model.l1, "weight", 0.1)
        prune.remove(model.l1, "weight")
    prune.l1_unstructured(model.l1, "weight", 0.1)
    assert isinstance(model.l1.weight_orig, torch.nn.Parameter)
    return len(model.l1.weight_orig._post_accumulate_grad_hooks)


def test_hooks_do_not_pile_up():
    assert run_ranks(gradient_masks, 2) == [1, 1]
