"""Random masks: as many as asked for, and the same wherever the elements are."""

import math
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distprune as prune
from distprune.base.hashing import hash_keys
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assembled, assert_nothing_wrong_on, wrong_masks
from helpers.models import Net, ShapesNet, fill, fqns, target


def single_masks(wrapping: str, calls: list[tuple[str, tuple]], seed: int) -> list[tuple]:
    """random_unstructured on (name, amounts) in turn; the mask shards and their indices."""
    indices = wrappings.local_indices(Net(), wrapping)
    masks = []
    for name, amounts in calls:
        model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping)
        module, parameter = target(wrappings.unwrapped(model), name)
        torch.manual_seed(seed)
        for amount in amounts:
            prune.random_unstructured(module, parameter, amount)
        masks.append((wrappings.local(getattr(module, parameter + "_mask")), indices[name]))
    return masks


@cache
def full_masks_of(wrapping: str, calls: tuple, seed: int = 0) -> list[torch.Tensor]:
    per_rank = run_ranks(single_masks, wrappings.world_size(wrapping), wrapping, calls, seed)
    shapes = [Net().get_parameter(name).shape for name, _ in calls]
    per_call = zip(*per_rank, strict=True)
    return [assembled(parts, shape) for parts, shape in zip(per_call, shapes, strict=True)]


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.SHARDED))
def test_one_seed_gives_one_mask_on_any_sharding(wrapping):
    names = ["l1.weight", "l2.weight", "l3.bias"]
    if wrappings.kind_of(wrapping) == "tp":
        names.remove("l3.bias")  # plain: it has torch's own stream of random numbers
    calls = tuple((name, (0.5, 0.4)) for name in names)
    expected = full_masks_of("fsdp2-2", calls)
    found = full_masks_of(wrapping, calls)
    assert [torch.equal(*pair) for pair in zip(found, expected, strict=True)] == [True] * len(names)


@pytest.mark.parametrize("wrapping", ["fsdp2-3", "hsdp-2x2", "tp-2", "fsdp2_tp-2x2"])
def test_exactly_as_many_as_asked_for(wrapping):
    cases = {(0,): 0, (60,): 60, (1,): 1, (0.5, 0.5): 45, (0.25, 5): 20}
    masks = full_masks_of(wrapping, tuple(("l1.weight", amounts) for amounts in cases))
    assert [int((mask == 0).sum()) for mask in masks] == list(cases.values())


def masks_of_seeds(num_seeds: int) -> list[tuple]:
    masks = []
    mesh = init_device_mesh("cpu", (2,))
    for seed in range(num_seeds):
        layer = fully_shard(torch.nn.Linear(6, 10), mesh=mesh)
        torch.manual_seed(seed)
        prune.random_unstructured(layer, "weight", 0.5)
        masks.append(layer.weight_mask.to_local())
    return masks


def test_every_seed_gives_another_mask_and_every_element_has_its_chance():
    """An element that 40 halves all keep, or all prune, has p < 1e-10."""
    masks = [torch.cat(parts) for parts in zip(*run_ranks(masks_of_seeds, 2, 40), strict=True)]
    times_pruned = sum((mask == 0).int() for mask in masks)
    assert [int((mask == 0).sum()) for mask in masks] == [30] * 40
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 40
    assert int(times_pruned.min()) > 0 and int(times_pruned.max()) < 40


def masks_of_other_seeds(wrapping: str) -> list[tuple]:
    """random_unstructured and random_structured, with another seed on each rank."""
    torch.manual_seed(dist.get_rank())
    model = fill(Net(), "normal", "float32")
    indices = wrappings.local_indices(model, wrapping)
    model = wrappings.wrap(model, wrapping)
    prune.random_unstructured(model.l1, "weight", 0.5)
    prune.random_structured(model.l2, "weight", 4, 1)
    return [
        (wrappings.local(layer.weight_mask), indices[name])
        for name, layer in [("l1.weight", model.l1), ("l2.weight", model.l2)]
    ]


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.SHARDED))
def test_ranks_with_other_seeds_agree(wrapping):
    per_rank = run_ranks(masks_of_other_seeds, wrappings.world_size(wrapping), wrapping)
    first, second = zip(*per_rank, strict=True)
    assert int((assembled(first, (10, 6)) == 0).sum()) == 30
    columns = assembled(second, (5, 10)).sum(0)
    assert sorted(columns.tolist()) == [0] * 4 + [5] * 6


SHAPES = {name: tuple(ShapesNet().get_parameter(name).shape) for name in fqns(ShapesNet())}
# (how many are pruned, floors, ceilings)
CALLS = [
    (48, {}, {}),
    (60, {"l2.weight": 0.5, "l3.weight": 0.8}, {"l1.weight": 0.3, "l1.bias": 0, "l3.bias": 0.34}),
]


def differences(wrapping: str, calls: list) -> list[str]:
    """A global score is a function of (seed of the first rank, index among all elements)."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    wrong = []
    for k, floors, ceilings in calls:
        model = fill(ShapesNet(), "normal", "float32")
        indices = wrappings.local_indices(model, wrapping)
        model = wrappings.wrap(model, wrapping)
        targets = {name: target(wrappings.unwrapped(model), name) for name in SHAPES}
        torch.manual_seed(7 + rank)
        report = prune.global_unstructured(
            list(targets.values()),
            prune.RandomUnstructured,
            amount=k,
            min_sparsity={targets[name]: floor for name, floor in floors.items()} or None,
            max_sparsity={targets[name]: ceiling for name, ceiling in ceilings.items()} or None,
        )
        torch.manual_seed(7)
        sizes = [math.prod(shape) for shape in SHAPES.values()]
        keys = hash_keys(torch.arange(sum(sizes)), int(torch.randint(2**62, (1,))))
        scores = [
            part.view(shape) for part, shape in zip(keys.split(sizes), SHAPES.values(), strict=True)
        ]
        low, high = [floors.get(n, 0) for n in SHAPES], [ceilings.get(n, 1) for n in SHAPES]
        keeps = reference.prune_bounded(scores, k, low, high)
        wrong += wrong_masks(model, dict(zip(SHAPES, keeps, strict=True)), indices, f"{k} pruned")
        if report.num_pruned != k:
            wrong.append(f"the report says {report.num_pruned}, not {k}")
    return wrong


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_global_masks_are_those_of_the_definition(wrapping):
    assert_nothing_wrong_on(wrapping, differences, CALLS)


def test_bounds_without_a_process_group():
    """Without bounds, the random numbers are there those that torch draws."""
    assert differences("plain-1", CALLS[1:]) == []
