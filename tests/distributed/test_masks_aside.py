"""``masks_aside`` loses no mask, whatever fails: all are handed back, and none is on a model.

A model that was pruned first and wrapped second without it is told so. That one trains with its
masks, sharded, is a row of test_operations.py.
"""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import distprune as prune
from distprune.base.naming import unwrap
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong, changes, snapshot
from helpers.models import Net, fill, target

NAMES = ["l1.weight", "l2.weight", "l3.weight"]


def pruned() -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, object]]:
    """A pruned model, its masks, and a snapshot."""
    model = fill(Net(), "normal", "float32")
    own = dist.new_subgroups(1)[0]
    prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5, group=own)
    masks = {name: target(model, name)[0].weight_mask.clone() for name in NAMES}
    return model, masks, snapshot(model)


def other_masks(model: nn.Module, masks: dict[str, torch.Tensor], names=NAMES) -> list[str]:
    wrong = []
    for name in names:
        held = target(model, name)[0].weight_mask
        held = held.full_tensor() if hasattr(held, "full_tensor") else held
        wrong += [] if torch.equal(held.bool(), masks[name].bool()) else [f"{name}: another mask"]
    return wrong


def handed_back(
    model: nn.Module, back: dict[str, torch.Tensor], masks: dict[str, torch.Tensor]
) -> list[str]:
    wrong = ["some masks are on the model"] * prune.is_pruned(model)
    if list(back) != NAMES or not all(torch.equal(back[n], masks[n].bool()) for n in NAMES):
        wrong.append(f"handed back: {back}")
    return wrong


def one_layer_is_refused(only_on: int | None) -> list[str]:
    """By its wrapper on every rank, or by its dtype on one."""
    model, masks, _ = pruned()
    mesh = init_device_mesh("cpu", (4,))
    with pytest.raises(NotImplementedError) as raised, prune.masks_aside(model):
        fully_shard(model.l1, mesh=mesh)
        if only_on is None:
            fully_shard(model.l2, mesh=DeviceMesh("cpu", [3, 2, 1, 0]))
        elif dist.get_rank() == only_on:
            quantised = model.l2.weight.detach().to(torch.float8_e4m3fn)
            model.l2.weight = nn.Parameter(quantised, requires_grad=False)
    text, back = str(raised.value), raised.value.masks
    wrong = [] if re.search("l2.weight(.|\n)*(ascend|float8)", text) else [text]
    wrong += handed_back(model, back, masks)
    # What was handed back goes on the layers that take it.
    for name in ("l1.weight", "l3.weight"):
        prune.custom_from_mask(target(model, name)[0], "weight", back[name])
    return wrong + other_masks(model, masks, ["l1.weight", "l3.weight"])


@pytest.mark.parametrize("only_on", [None, 0, 3])
def test_one_unsupported_layer(only_on):
    assert_nothing_wrong(run_ranks(one_layer_is_refused, 4, only_on))


def body_raises(only_on: int | None, kind: type[BaseException]) -> list[str]:
    model, masks, _ = pruned()
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(BaseException, match="out of memory") as raised, prune.masks_aside(model):
        fully_shard(model.l1, mesh=mesh)
        if only_on is None or dist.get_rank() == only_on:
            raise kind("out of memory")
    wrong = [] if isinstance(raised.value, kind) else [repr(raised.value)]
    return wrong + handed_back(model, raised.value.masks, masks)


def bodies_raise() -> list[str]:
    cases = [(None, RuntimeError), (0, RuntimeError), (1, RuntimeError), (None, KeyboardInterrupt)]
    return [f"{case}: {text}" for case in cases for text in body_raises(*case)]


def test_the_body_raises_or_is_interrupted():
    assert_nothing_wrong(run_ranks(bodies_raise, 2))


def refused_on_entry(only_on: int) -> list[str]:
    """A rank has a mask that multiplies; then another set of masks."""
    model, *_ = pruned()
    is_other = dist.get_rank() == only_on
    if is_other:
        model.l2.weight_mask[0, 0] = 0.5
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"l2\.weight(.|\n)*0\.5"), prune.masks_aside(model):
        pass
    wrong = changes(before, snapshot(model))
    if is_other:
        prune.remove(model.l2, "weight")
    before = snapshot(model)
    with pytest.raises(ValueError, match="pruned parameters: l1"), prune.masks_aside(model):
        pass
    return wrong + changes(before, snapshot(model))


@pytest.mark.parametrize("only_on", [0, 1])
def test_refused_on_entry(only_on):
    assert_nothing_wrong(run_ranks(refused_on_entry, 2, only_on))


def told(wrapping: str) -> list[str]:
    """Pruning, verify and remove say what to do; with masks_aside nothing whole is left."""
    model = wrappings.wrap(pruned()[0], wrapping)
    layer, wrong = unwrap(wrappings.unwrapped(model).l1), []
    calls = {
        "prune": lambda: prune.l1_unstructured(layer, "weight", 0.1),
        "remove": lambda: prune.remove(layer, "weight"),
        "verify": lambda: prune.verify(model),
    }
    for what, call in calls.items():
        try:
            call()
            wrong.append(f"{what}: nothing was raised")
        except (RuntimeError, prune.VerificationError) as error:
            wrong += [f"{what}: {error}"] * ("masks_aside" not in str(error))
    model, *_ = pruned()
    with prune.masks_aside(model):
        wrong += ["still pruned inside"] * prune.is_pruned(model)
        model = wrappings.wrap(model, wrapping)
    for module in wrappings.unwrapped(model).modules():
        for name, held in [*module._buffers.items(), *module.__dict__.items()]:
            whole = isinstance(held, torch.Tensor) and not isinstance(held, DTensor)
            if whole and held.numel() >= 50 and name not in ("weight", "_flat_param"):
                wrong.append(f"a whole tensor is left: {name} {tuple(held.shape)}")
    return wrong


def test_what_is_told_of_a_model_that_was_pruned_before_it_was_sharded():
    for wrapping in ("fsdp2-2", "fsdp1-2", "fsdp1_flat-2"):
        assert_nothing_wrong(run_ranks(told, 2, wrapping))
