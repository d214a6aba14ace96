"""``masks_aside`` loses no mask, whatever fails: they are put back everywhere, or handed back."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import distprune as prune
from distprune.testing import run_ranks
from helpers.comparisons import assert_nothing_wrong, changes, snapshot, wrong_masks
from helpers.models import Net, fill, target

NAMES = ["l1.weight", "l2.weight", "l3.weight"]


def pruned() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = fill(Net(), "normal", "float32")
    own = dist.new_subgroups(1)[0]
    prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5, group=own)
    return model, {n: target(model, n)[0].weight_mask.clone() for n in NAMES}


def one_layer_is_refused(only_on: int | None) -> list[str]:
    """By its wrapper on every rank, or by its dtype on one."""
    model, masks = pruned()
    mesh = init_device_mesh("cpu", (4,))
    try:
        with prune.masks_aside(model):
            fully_shard(model.l1, mesh=mesh)
            if only_on is None:
                fully_shard(model.l2, mesh=DeviceMesh("cpu", [3, 2, 1, 0]))
            elif dist.get_rank() == only_on:
                quantised = model.l2.weight.detach().to(torch.float8_e4m3fn)
                model.l2.weight = nn.Parameter(quantised, requires_grad=False)
        return ["nothing was raised"]
    except NotImplementedError as error:
        raised = error
    wrong = [] if re.search("l2.weight(.|\n)*(ascend|float8)", str(raised)) else [str(raised)]
    if prune.is_pruned(model):
        wrong.append("some masks are on the model")
    if list(raised.masks) != NAMES:
        return [*wrong, f"handed back: {list(raised.masks)}"]
    wrong += [n for n in NAMES if not torch.equal(raised.masks[n], masks[n])]
    # What was handed back goes on the layers that take it.
    for name in ("l1.weight", "l3.weight"):
        layer = target(model, name)[0]
        prune.custom_from_mask(layer, "weight", raised.masks[name])
        held = layer.weight_mask
        held = held.full_tensor() if hasattr(held, "full_tensor") else held
        wrong += [] if torch.equal(held.bool(), masks[name].bool()) else [f"{name}: another mask"]
    return wrong


@pytest.mark.parametrize("only_on", [None, 0, 3])
def test_one_unsupported_layer(only_on):
    assert_nothing_wrong(run_ranks(one_layer_is_refused, 4, only_on))


def body_raises(only_on: int | None, after_wrapping: bool, kind: type) -> list[str]:
    model, masks = pruned()
    before = snapshot(model)
    mesh = init_device_mesh("cpu", (2,))
    mine = only_on is None or dist.get_rank() == only_on
    try:
        with prune.masks_aside(model):
            if after_wrapping:
                for layer in (model.l1, model.l2, model.l3):
                    fully_shard(layer, mesh=mesh)
            if mine:
                raise kind("out of memory")
        return ["nothing was raised"]
    except BaseException as error:
        raised = error
    wrong = [] if type(raised) is kind and "out of memory" in str(raised) else [repr(raised)]
    wrong += ["handed back"] * hasattr(raised, "masks")
    if not after_wrapping:
        # Hooks are registered anew, under other numbers.
        return wrong + [each for each in changes(before, snapshot(model)) if "hooks" not in each]
    for name in NAMES:
        held = target(model, name)[0].weight_mask.full_tensor()
        wrong += [] if torch.equal(held.bool(), masks[name].bool()) else [f"{name}: another mask"]
    return wrong


@pytest.mark.parametrize("after_wrapping", [False, True])
@pytest.mark.parametrize("only_on", [None, 0, 1])
def test_the_body_raises(only_on, after_wrapping):
    assert_nothing_wrong(run_ranks(body_raises, 2, only_on, after_wrapping, RuntimeError))


def test_the_body_is_interrupted():
    assert_nothing_wrong(run_ranks(body_raises, 2, None, True, KeyboardInterrupt))


def refused_on_entry(only_on: int) -> list[str]:
    model, _ = pruned()
    if dist.get_rank() == only_on:
        model.l2.weight_mask[0, 0] = 0.5
    before = snapshot(model)
    try:
        with prune.masks_aside(model):
            return ["nothing was raised"]
    except ValueError as error:
        wrong = [] if re.search(r"l2\.weight(.|\n)*0\.5", str(error)) else [str(error)]
        return wrong + changes(before, snapshot(model))


@pytest.mark.parametrize("only_on", [0, 1])
def test_refused_on_entry(only_on):
    assert_nothing_wrong(run_ranks(refused_on_entry, 2, only_on))


def alone() -> list[str]:
    """A group of this rank alone: nothing is asked of the others."""
    own = dist.new_subgroups(1)[0]
    model, masks = pruned()
    if dist.get_rank() == 0:
        with prune.masks_aside(model, group=own):
            pass
    return wrong_masks(
        model, masks, {n: torch.arange(m.numel()).view(m.shape) for n, m in masks.items()}
    )


def test_a_group_of_one():
    assert_nothing_wrong(run_ranks(alone, 2))
