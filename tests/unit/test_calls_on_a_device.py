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
# each; and a sum of two numbers after a draft was corrected (passes.finish_drafts).
PER_PARAMETER = {"mul": 1}


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


@pytest.mark.parametrize("call", ["first pruning", "second pruning", "verify"])
def test_launches_and_waits_do_not_grow_with_the_number_of_parameters(call):
    interpreted()
    found = {}
    with as_on_device(triton=True):
        for number in (FEW, FEW, MANY):  # the first fills caches
            model = model_of(number)
            if call != "first pruning":
                prune(model)
            run = distprune.verify if call == "verify" else prune
            found[number] = counts_of(lambda run=run, model=model: run(model))
    grown = found[MANY] - found[FEW]
    assert grown.pop("waits", 0) == 0
    assert found[FEW]["waits"] > 0 and found[FEW]["weigh_tiles"] == 1
    allowed = {} if call == "verify" else PER_PARAMETER
    more = {
        name: count for name, count in grown.items()
        if count > allowed.get(name, 0) * (MANY - FEW)
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
    interpreted()
    model = healthy(dtype)
    with torch.no_grad():
        mutation(model)
    expected = outcome(model)
    assert expected[0] == (mutation in (MUTATIONS[0], infinite_kept))
    for triton in (False, True):
        with as_on_device(triton=triton):
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


def reading_of(values, mask=None, product=None, has_replicas=True):
    mask = values != 0 if mask is None else mask
    parameter = nn.Parameter(values, requires_grad=False)
    shard = ShardReader().read_tensor(parameter, "weight", mask)
    return inspecting.Reading(shard, product, has_replicas)


@pytest.mark.parametrize("triton", [False, True])
def test_one_parameter_that_cannot_be_read_stops_no_other(triton):
    """A product of another size; masks and values of every kind, with gaps, with replicas."""
    interpreted()
    torch.manual_seed(2)
    gaps = torch.randn(12, 10)[:, ::2]
    readings = [
        reading_of(torch.randn(8, 9)),
        reading_of(gaps, product=gaps.clone()),
        reading_of(torch.randn(8, 9), product=torch.ones(3, 3)),
        reading_of(torch.randint(-1, 2, (40,)), product=torch.randint(-1, 2, (40,))),
        reading_of(torch.randn(5, dtype=torch.complex64), mask=torch.tensor([0, 1, 0, 1, 0])),
        reading_of(torch.empty(0, 4)),
        reading_of(torch.tensor(math.inf), mask=torch.tensor(False)),
        reading_of(torch.ones(30), mask=torch.arange(30) % 4, has_replicas=False),
        reading_of(torch.ones(30), mask=torch.eye(6)[:, :5].reshape(30), product=torch.ones(30)),
    ]
    expected = inspecting.measure(readings)
    with as_on_device(triton=triton):
        found = inspecting.measure(readings)
    wrong = [isinstance(each, inspecting.Failed) for each in found]
    assert wrong == [number == 2 for number in range(len(readings))]
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if number != 2:
            assert one == other
    assert found[1].checksum != 0 and found[7].checksum == 0 and found[6].has_infinite
    assert found[8].is_exposed and found[3].is_exposed


def test_parameters_beyond_a_batch_are_measured_in_the_next_one(monkeypatch):
    interpreted()
    monkeypatch.setattr(inspecting, "_DEVICE_BATCH", 50)
    readings = [reading_of(torch.randn(6, 6).relu()) for _ in range(5)]
    expected = inspecting.measure(readings)
    with as_on_device(triton=True):
        assert inspecting.measure(readings) == expected
