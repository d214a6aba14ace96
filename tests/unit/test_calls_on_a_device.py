"""Calls on a device: what they find, and how often they launch kernels and make the host wait.

A CPU stands for the device. Triton's kernels are interpreted.
"""

import contextlib
import math
import os
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import distprune
from distprune.masks.fingerprint import fingerprint_parts
from distprune.shards.reader import ShardReader
from distprune.verification import inspecting
from helpers.rehearsal import as_on_device

FEW, MANY = 10, 20
# No kernels: views, memory without contents, and types.
NO_KERNELS = {
    "alias", "as_strided", "detach", "empty", "empty_like", "expand", "is_pinned", "lift_fresh",
    "new_empty", "permute", "promote_types", "reshape", "select", "set_", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip
# Methods of tensors on a device that wait for it.
WAITS = ("tolist", "item", "cpu", "numpy", "__int__", "__bool__", "__float__", "nonzero")
# What is launched once per parameter: the product of weight and mask, which autograd records for
# each; and the count of a mask that is in force already.
PER_PARAMETER = {"mul": 1, "eq": 1, "count_nonzero": 1}


def interpreted():
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here, and does not interpret")


class Operations(TorchDispatchMode):
    """Counts torch's operations that are kernels."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in NO_KERNELS:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def counts_of(call):
    """Kernels by name, and waits, of a call as on a device with Triton."""
    from triton.runtime.interpreter import InterpretedFunction

    counts = Counter()
    launch = InterpretedFunction.run

    def launched(self, *args, **kwargs):
        counts[self.fn.__name__] += 1
        with _disable_current_modes():
            return launch(self, *args, **kwargs)

    def counted(name):
        original = getattr(torch.Tensor, name)

        def waited(self, *args, **kwargs):
            counts["waits"] += 1
            return original(self, *args, **kwargs)

        return waited

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(InterpretedFunction, "run", launched))
        for name in WAITS:
            stack.enter_context(mock.patch.object(torch.Tensor, name, counted(name)))
        stack.enter_context(Operations(counts))
        call()
    return counts


def model_of(number):
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(number)])


def prune(model):
    pairs = [(module, "weight") for module in model]
    distprune.global_unstructured(pairs, distprune.L1Unstructured, amount=0.5)


@pytest.mark.parametrize("call", ["first pruning", "second pruning"])
def test_launches_and_waits_do_not_grow_with_the_number_of_parameters(call):
    interpreted()
    found = {}
    with as_on_device(triton=True):
        for number in (FEW, FEW, MANY):  # the first fills caches
            model = model_of(number)
            if call != "first pruning":
                prune(model)
            found[number] = counts_of(lambda model=model: prune(model))
    grown = found[MANY] - found[FEW]
    assert grown.pop("waits", 0) == 0
    assert found[FEW]["waits"] > 0
    more = {
        name: count for name, count in grown.items()
        if count > PER_PARAMETER.get(name, 0) * (MANY - FEW)
    }  # fmt: skip
    assert not more


def test_without_triton_fingerprints_are_not_launched_one_by_one():
    found = {}
    with as_on_device(triton=False):
        for number in (FEW, MANY):
            model = model_of(number)
            prune(model)
            shards = [ShardReader().read(module, "weight", "weight") for module in model]
            masks = [module.weight_mask for module in model]
            found[number] = Counter()
            with Operations(found[number]):
                fingerprint_parts(shards, masks)
    assert found[MANY] == found[FEW] and found[FEW]["cumsum"] == 1


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
    with as_on_device(triton=False):
        assert outcome(model) == expected


@pytest.mark.parametrize("triton", [False, True])
def test_masks_written_on_a_device_verify_on_a_cpu(triton):
    interpreted()
    with as_on_device(triton=triton):
        model = healthy(torch.float32)
    assert distprune.verify(model).ok
    records = [model[name]._forward_pre_hooks for name in ("linear", "conv", "other")]
    expected = [hook.record for hooks in records for hook in hooks.values()]
    on_cpu = healthy(torch.float32)
    records = [on_cpu[name]._forward_pre_hooks for name in ("linear", "conv", "other")]
    assert [hook.record for hooks in records for hook in hooks.values()] == expected


LAYERS = {
    "gaps": (torch.randn(12, 10)[:, ::2], None),
    "integers": (torch.randint(-1, 2, (40,)), None),
    "complex": (torch.randn(5, dtype=torch.complex64), torch.tensor([0, 1, 0, 1, 0])),
    "empty": (torch.empty(0, 4), None),
    "infinite": (torch.tensor(math.inf), torch.tensor(False)),
    "not binary": (torch.ones(30), torch.arange(30) % 4),
    "mask with gaps": (torch.ones(30), torch.eye(6)[:, :5].reshape(30)),
}


def test_verify_reads_masks_and_values_of_every_kind_as_on_a_cpu():
    model = nn.ModuleDict({name: nn.Module() for name in LAYERS})
    for name, (values, mask) in LAYERS.items():
        layer = model[name]
        layer.weight = nn.Parameter(values, requires_grad=False)
        distprune.custom_from_mask(layer, "weight", torch.ones_like(values, dtype=torch.bool))
        layer.weight_mask = (values != 0) if mask is None else mask
    expected = outcome(model)
    assert sum(len(each.problems) for each in expected[1]) == 10
    with as_on_device(triton=False):
        assert outcome(model) == expected


def test_one_parameter_that_cannot_be_read_stops_no_other():
    model = healthy(torch.float32)
    exposed(model)
    product_of = inspecting._product

    def product(place, shard):
        if place.path == "linear.weight":
            raise RuntimeError("no memory")
        return product_of(place, shard)

    with mock.patch.object(inspecting, "_product", product):
        report = distprune.verify(model, raise_errors=False)
    problems = {each.name: each.problems for each in report.parameters}
    assert "cannot be read: RuntimeError: no memory" in problems["linear.weight"]
    assert problems["conv.weight"] and problems["other.weight"]
