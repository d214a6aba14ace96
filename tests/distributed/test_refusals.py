"""What is not supported is refused by name, on every rank, before anything changes."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import distprune as prune
import wraps
from checks import changes, snapshot
from distprune.testing import run_ranks
from models import Net, fill, target


def refusal(model: nn.Module, call) -> tuple[str, str, list[str]]:
    before = snapshot(model)
    try:
        call()
        error = ("nothing", "")
    except Exception as raised:
        error = (type(raised).__name__, str(raised))
    return *error, changes(before, snapshot(model))


def assert_refused(per_rank: list, text: str) -> None:
    for kind, message, changed in per_rank:
        assert kind == "NotImplementedError", per_rank
        assert re.search(text, message)
        assert changed == []


def prune_all(model: nn.Module, names: list[str]) -> None:
    targets = [target(model, name) for name in names]
    prune.global_unstructured(targets, prune.L1Unstructured, amount=0.5)


def partial_placement(single: bool) -> tuple[str, str, list[str]]:
    model = fill(Net(), "normal", "float32")
    mesh = init_device_mesh("cpu", (2,))
    model.l2.weight = nn.Parameter(DTensor.from_local(model.l2.weight.data, mesh, [Partial()]))
    if single:
        return refusal(model, lambda: prune.l1_unstructured(model.l2, "weight", 0.5))
    return refusal(model, lambda: prune_all(model, ["l1.weight", "l2.weight"]))


@pytest.mark.parametrize("single", [False, True])
def test_partial_placements(single):
    assert_refused(run_ranks(partial_placement, 2, single), r"weight(.|\n)*(Partial|P\(sum\))")


def scores_on_other_placements() -> tuple[str, str, list[str]]:
    model = wraps.wrap(fill(Net(), "normal", "float32"), "fsdp2-2")
    mesh = model.l1.weight.device_mesh
    scores = distribute_tensor(torch.ones(10, 6), mesh, [Shard(1)])
    targets = [(model.l1, "weight"), (model.l2, "weight")]
    return refusal(
        model,
        lambda: prune.global_unstructured(
            targets, prune.L1Unstructured, {targets[0]: scores}, amount=0.5
        ),
    )


def test_scores_on_other_placements_than_their_parameter():
    per_rank = run_ranks(scores_on_other_placements, 2)
    for kind, message, changed in per_rank:
        assert kind in ("ValueError", "NotImplementedError")
        assert re.search(r"weight(.|\n)*Shard\(dim=1\)", message)
        assert changed == []


def integer_reshard(single: bool) -> tuple[str, str, list[str]]:
    model = wraps.wrap(fill(Net(), "normal", "float32"), "fsdp2-4", reshard_after_forward=2)
    if single:
        return refusal(model, lambda: prune.l1_unstructured(model.l2, "weight", 0.5))
    return refusal(model, lambda: prune_all(model, ["l1.weight", "l2.weight"]))


@pytest.mark.parametrize("single", [False, True])
def test_reshard_after_forward_to_a_smaller_mesh(single):
    assert_refused(run_ranks(integer_reshard, 4, single), "weight(.|\n)*reshard_after_forward")


def fsdp1(use_orig_params: bool, whole: bool, single: bool) -> tuple[str, str, list[str]]:
    inner = fill(Net(), "normal", "float32")
    options = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    if whole:
        model = FullyShardedDataParallel(inner, **options)
        l1 = model.module.l1
    else:
        inner.l1 = FullyShardedDataParallel(inner.l1, **options)
        model, l1 = inner, inner.l1.module
    name = next(name for name, _ in [*l1.named_parameters(), ("weight", None)])
    if single:
        return refusal(model, lambda: prune.l1_unstructured(l1, name, 0.5))
    targets = [(l1, name), (inner.l2, "weight")]
    return refusal(
        model, lambda: prune.global_unstructured(targets, prune.L1Unstructured, amount=0.5)
    )


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["one layer", "whole model"])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1(use_orig_params, whole, single):
    per_rank = run_ranks(fsdp1, 2, use_orig_params, whole, single)
    assert_refused(per_rank, "FullyShardedDataParallel|FSDP1")
    assert all("fully_shard" in message for _, message, _ in per_rank)  # the way out
