"""What is not supported is refused by name, on every rank, before anything changes."""

import gc
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import changes, snapshot
from helpers.models import Net, fill, target


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
    model = wrappings.wrap(fill(Net(), "normal", "float32"), "fsdp2-2")
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


def fsdp1(use_orig_params: bool, case: str, single: bool) -> tuple[str, str, list[str]]:
    model = wrappings.wrap(
        fill(Net(), "normal", "float32"),
        "fsdp1-2",
        use_orig_params=use_orig_params,
        sharding_strategy=getattr(ShardingStrategy, case, ShardingStrategy.FULL_SHARD),
    )
    layer = model.module.l1.module
    targets = prune.select(model)
    if case == "without its wrapper":
        model.module.l1 = layer
        gc.collect()
    context = nullcontext()
    if case == "summoned":
        context = FullyShardedDataParallel.summon_full_params(model)
    with context:
        if single:
            return refusal(model, lambda: prune.l1_unstructured(layer, "weight", 0.5))
        return refusal(
            model, lambda: prune.global_unstructured(targets, prune.L1Unstructured, amount=0.5)
        )


WAYS_OUT = {"NO_SHARD": "DistributedDataParallel", "summoned": "outside of that context"}


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("case", WAYS_OUT)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1(use_orig_params, case, single):
    assert_refused(run_ranks(fsdp1, 2, use_orig_params, case, single), WAYS_OUT[case])


def test_fsdp1_without_its_wrapper():
    per_rank = run_ranks(fsdp1, 2, True, "without its wrapper", True)
    assert_refused(per_rank, "whose wrapper is gone")
