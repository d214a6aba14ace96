"""Replicas that differ are detected, however their differences are arranged.

Each of these cancels in a sum, over ranks or over words, of what a checksum sees.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

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


class Above(prune.BasePruningMethod):
    """Keeps what is above the first of some limits; or, without any, above the rank's number."""

    PRUNING_TYPE = "unstructured"
    DISTRIBUTED = "elementwise"

    def __init__(self, limits=None):
        self.limits = limits

    def compute_mask(self, t, default_mask):
        limit = dist.get_rank() if self.limits is None else float(next(iter(self.limits)))
        return default_mask * (t.abs() > limit)


class AboveScores(Above):
    DISTRIBUTED = "scores"
    amount = 0.5

    def compute_scores(self, t):
        return t * (1 - 2 * dist.get_rank())


class Colliding(prune.BasePruningMethod):
    """Leaves out three elements: others on each rank, with equal sums of i and of i * i."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t, default_mask):
        return default_mask * colliding_mask(t.shape)


def colliding_mask(shape) -> torch.Tensor:
    mask = torch.ones(shape)
    mask.view(-1)[[[0, 4, 5], [1, 2, 6]][dist.get_rank()]] = 0
    return mask


def wrong_with_another_method(wrapping: str, case: str) -> list[str]:
    model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping)
    rank = dist.get_rank()
    limits = {
        "list": [0.1 + rank],
        "dict": {0.1 + rank: None},
        "tensor": torch.tensor([0.1 + rank]),
        "nested": [[[0.1 + rank]]],
    }
    targets = [target(wrappings.unwrapped(model), name) for name in NAMES]

    def call() -> None:
        match case:
            case "rank":
                prune.global_unstructured(targets, Above)
            case "scores of the rank":
                prune.global_unstructured(targets, AboveScores)
            case "undeclared":
                prune.global_unstructured(targets, Colliding)
            case _:
                prune.global_unstructured(targets, Above, limits=limits[case])

    if case == "undeclared" and wrappings.kind_of(wrapping) not in ("plain", "ddp"):
        return wrong_unless_told(model, call, text="DISTRIBUTED", kind=NotImplementedError)
    return wrong_unless_told(model, call, text="limits" if case in limits else "mask")


@pytest.mark.parametrize(
    "case", ["list", "dict", "tensor", "nested", "rank", "scores of the rank", "undeclared"]
)
@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-2", "hsdp-2x1"])
def test_a_method_that_is_another_one_on_each_replica(wrapping, case):
    per_rank = run_ranks(wrong_with_another_method, 2, wrapping, case, timeout=SECONDS)
    assert_nothing_wrong(per_rank)


def wrong_with_another_tensor(wrapping: str, what: str) -> list[str]:
    """A whole mask, or whole scores, of which each rank would slice its own."""
    model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping)
    layer = wrappings.unwrapped(model).l1
    if what == "mask":
        given = colliding_mask((10, 6))
        return wrong_unless_told(
            model, lambda: prune.custom_from_mask(layer, "weight", given), text="mask"
        )
    scores = {(layer, "weight"): torch.ones(10, 6) + dist.get_rank() * torch.eye(10, 6)}
    if what == "scores of one parameter":
        return wrong_unless_told(
            model,
            lambda: prune.l1_unstructured(layer, "weight", 0.5, *scores.values()),
            text="scores",
        )
    return wrong_unless_told(
        model, lambda: prune_all(model, importance_scores=scores), text="scores"
    )


@pytest.mark.parametrize("what", ["mask", "scores", "scores of one parameter"])
@pytest.mark.parametrize("wrapping", ["fsdp1-2", "fsdp2-2", "tp-2"])
def test_whole_tensors_that_differ(wrapping, what):
    assert_nothing_wrong(run_ranks(wrong_with_another_tensor, 2, wrapping, what, timeout=SECONDS))


@torch.no_grad()
def wrong_on_meshes_of_some_ranks() -> list[str]:
    """One parameter lies on two meshes, the other on one of these; half of the ranks have none."""
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    generator = torch.Generator().manual_seed(0)
    everywhere, somewhere = (torch.randn(6, 5, generator=generator) for _ in range(2))
    model = nn.Module()
    own = meshes[dist.get_rank() // 2]
    model.a = nn.Parameter(
        DTensor.from_local(everywhere[own.get_local_rank() * 3 :][:3], own, [Shard(0)])
    )
    model.b = nn.Parameter(distribute_tensor(somewhere, meshes[0], [Shard(0)], src_data_rank=None))
    report = prune.global_unstructured(
        [(model, "a"), (model, "b")], prune.L1Unstructured, amount=0.5
    )
    scores = torch.cat([everywhere.view(-1), somewhere.view(-1)]).abs()
    keep = torch.ones(60).index_fill(0, scores.argsort()[:30], 0)
    wrong = [] if [p.num_elements for p in report.parameters] == [30, 30] else [str(report)]
    mine = keep[:30].view(6, 5)[own.get_local_rank() * 3 :][:3]
    if not torch.equal(wrappings.local(model.a_mask).float(), mine):
        wrong.append(f"a: {wrappings.local(model.a_mask)}")
    other = keep[30:].view(6, 5)[dist.get_rank() * 3 :][:3] if dist.get_rank() < 2 else mine[:0]
    if not torch.equal(wrappings.local(model.b_mask).float().view(other.shape), other):
        wrong.append(f"b: {wrappings.local(model.b_mask)}")
    if report.num_pruned_now != 30:
        wrong.append(f"pruned {report.num_pruned_now}")
    return wrong


def test_meshes_of_one_shape_without_some_ranks():
    assert_nothing_wrong(run_ranks(wrong_on_meshes_of_some_ranks, 4, timeout=SECONDS))
