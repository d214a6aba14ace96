"""Replicas that differ are detected, however their differences are arranged.

Each of these cancels in a sum, over ranks or over words, of what a checksum sees.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import distprune as prune
from distprune.base.naming import NamedParameter
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong, changes, snapshot
from helpers.models import EVEN, Net, fill, target

NAMES = ["l1.weight", "l2.weight", "l3.weight"]
SECONDS = 40


def wrong_unless_told(model: nn.Module, call, *, text: str, kind: type = ValueError) -> list[str]:
    """What is wrong if a call does not raise this, or changes anything."""
    before, wrong = snapshot(model), []
    try:
        call()
        wrong.append("nothing was raised")
    except Exception as error:
        if not isinstance(error, kind) or text not in str(error):
            wrong.append(f"{type(error).__name__}: {error}")
    return wrong + changes(before, snapshot(model))


def prune_all(model: nn.Module, method=prune.L1Unstructured, **arguments) -> None:
    targets = [target(wrappings.unwrapped(model), name) for name in NAMES]
    prune.global_unstructured(targets, method, **({"amount": 0.5} | arguments))


@torch.no_grad()
def wrong_with_opposite_differences(wrapping: str) -> list[str]:
    """Rank 1 has w + d and rank 2 has w - d, as integers of the bits."""
    model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping)
    weight = wrappings.unwrapped(model).l1.weight
    weight.view(torch.int32)[0, 0] += (0, 1, -1)[dist.get_rank()]
    return wrong_unless_told(model, lambda: prune_all(model), text="replicas")


@pytest.mark.parametrize("wrapping", ["plain-3", "ddp-3"])
def test_opposite_differences(wrapping):
    per_rank = run_ranks(wrong_with_opposite_differences, 3, wrapping, timeout=SECONDS)
    assert_nothing_wrong(per_rank)


@torch.no_grad()
def wrong_with_exchanged_shards(what: str) -> list[str]:
    """The second replica of an HSDP model has the right numbers, on the wrong one of its ranks."""
    model = wrappings.wrap(fill(Net(EVEN), "normal", "float32"), "hsdp-2x2")
    if what != "values":
        prune.l1_unstructured(model.l1, "weight", 0.4)
    parameter = model.l1.weight
    local = wrappings.local(parameter if what == "values" else model.l1.weight_mask)
    shards = [torch.empty_like(local) for _ in range(2)]
    dist.all_gather(shards, local, group=parameter.device_mesh.get_group(1))
    is_second, place = divmod(dist.get_rank(), 2)
    if what == "two bits":  # at one place of both shards, of which one is set and one is not
        local.view(-1)[7] = place != is_second
    elif is_second:
        local.copy_(shards[1 - place])
    return wrong_unless_told(model, lambda: prune_all(model), text="replicas")


@pytest.mark.parametrize("what", ["values", "masks", "two bits"])
def test_a_replica_with_exchanged_shards(what):
    assert_nothing_wrong(run_ranks(wrong_with_exchanged_shards, 4, what, timeout=SECONDS))


@torch.no_grad()
def wrong_with_permuted_experts() -> list[str]:
    """Two experts of one name; the rows of one are those of the other in another order."""
    rank = dist.get_rank()
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    expert = nn.Linear(8, 6, bias=False)
    rows = torch.arange(48.0).view(6, 8) + 1
    expert.weight.copy_(rows if rank < 2 else torch.cat([rows[3:], rows[:3]]))
    fully_shard(expert, mesh=meshes[rank // 2])
    pairs = [NamedParameter(expert, "weight", "expert.weight")]

    def call() -> None:
        prune.global_unstructured(pairs, prune.L1Unstructured, amount=5, pipeline_parallel=True)

    return wrong_unless_told(expert, call, text="expert.weight")


def test_experts_that_are_permutations_of_each_other():
    assert_nothing_wrong(run_ranks(wrong_with_permuted_experts, 4, timeout=SECONDS))
