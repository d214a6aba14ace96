"""Calls on a device: what they find, and how often they make the host wait.

A CPU stands for the device.
"""

import contextlib
import math
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn

import distprune
from distprune.base import memory

FEW, MANY = 10, 20


def as_on_device():
    """Within it, elements on a CPU are worked on as those on a device are."""
    return mock.patch.object(memory, "takes_numpy", lambda device: False)


# Methods of tensors on a device that wait for it; not int(), which fingerprints take of numbers on
# the host.
WAITS = ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "nonzero")


def waits_of(call):
    """How often a call waits for a device."""
    counts = Counter()

    def counted(name):
        original = getattr(torch.Tensor, name)

        def waited(self, *args, **kwargs):
            counts["waits"] += 1
            return original(self, *args, **kwargs)

        return waited

    with contextlib.ExitStack() as stack:
        for name in WAITS:
            stack.enter_context(mock.patch.object(torch.Tensor, name, counted(name)))
        call()
    return counts["waits"]


def model_of(number):
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(number)])


def prune(model):
    pairs = [(module, "weight") for module in model]
    distprune.global_unstructured(pairs, distprune.L1Unstructured, amount=0.5)


@pytest.mark.parametrize("call", ["first pruning", "second pruning", "verify"])
def test_waits_do_not_grow_with_the_number_of_parameters(call):
    found = {}
    with as_on_device():
        for number in (FEW, FEW, MANY):  # the first fills caches
            model = model_of(number)
            if call != "first pruning":
                prune(model)
            run = distprune.verify if call == "verify" else prune
            found[number] = waits_of(lambda run=run, model=model: run(model))
    assert found[MANY] == found[FEW] > 0


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def healthy(dtype):
    torch.manual_seed(1)
    model = nn.ModuleDict({
        "linear": nn.Linear(33, 5),
        "conv": nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
        "other": nn.Linear(64, 70),
        "kept": nn.Linear(3, 3),
    }).to(dtype)  # fmt: skip
    names = ("linear", "conv", "other")
    distprune.global_unstructured(
        [(model[name], "weight") for name in names], distprune.L1Unstructured, amount=0.6
    )
    return model


def pruned_index(module):
    return tuple((module.weight_mask == 0).nonzero()[-1].tolist())


def not_binary(model):
    model.linear.weight_mask[2, 2] = 0.5
    model.other.weight_mask[:3, 7] = math.nan


def infinite_under(model):
    with torch.no_grad():
        model.linear.weight_orig[pruned_index(model.linear)] = math.inf
        model.conv.weight_orig[pruned_index(model.conv)] = math.nan


def infinite_kept(model):
    with torch.no_grad():
        kept = tuple((model.conv.weight_mask != 0).nonzero()[-1].tolist())
        model.conv.weight_orig[kept] = -math.inf


def exposed(model):
    with torch.no_grad():
        model.other.weight[pruned_index(model.other)] = -1e-6
        model.conv.weight[pruned_index(model.conv)] = math.nan


def both(model):
    exposed(model)
    infinite_under(model)


def flipped(model):
    model.other.weight_mask[pruned_index(model.other)] = 1


MUTATIONS = (lambda model: None, not_binary, infinite_under, infinite_kept, exposed, both, flipped)


def outcome(model):
    report = distprune.verify(model, raise_errors=False)
    return report.ok, report.parameters, report.problems


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_verify_finds_what_it_finds_on_a_cpu(mutation, dtype):
    model = healthy(dtype)
    with torch.no_grad():
        mutation(model)
    expected = outcome(model)
    assert expected[0] == (mutation in (MUTATIONS[0], infinite_kept))
    with as_on_device():
        assert outcome(model) == expected


def test_masks_written_on_a_device_verify_on_a_cpu():
    with as_on_device():
        model = healthy(torch.float32)
    assert distprune.verify(model).ok
    records = [model[name]._forward_pre_hooks for name in ("linear", "conv", "other")]
    expected = [hook.record for hooks in records for hook in hooks.values()]
    on_cpu = healthy(torch.float32)
    records = [on_cpu[name]._forward_pre_hooks for name in ("linear", "conv", "other")]
    assert [hook.record for hooks in records for hook in hooks.values()] == expected
