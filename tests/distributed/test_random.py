"""Random masks: as many as asked for, and the same wherever the elements are."""

from functools import cache

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assembled
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
    torch.manual_seed(torch.distributed.get_rank())
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


def global_masks(wrapping: str, seed_per_rank: bool, batch_norm: bool):
    """global RandomUnstructured; per parameter the mask shard, its indices and the full shape."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank if seed_per_rank else 7)
    model = fill(ShapesNet(), "normal", "float32")
    if batch_norm:
        model = torch.nn.Sequential(model, torch.nn.BatchNorm1d(3))
        model = DistributedDataParallel(model)
        names = ["0.l1.weight", "0.l2.weight"]
        shapes = {name: tuple(model.module.get_parameter(name).shape) for name in names}
        targets = [target(model.module, name) for name in names]
        indices = {
            name: torch.arange(m.weight.numel())
            for name, (m, _) in zip(names, targets, strict=True)
        }
    else:
        names = fqns(model)
        shapes = {name: tuple(model.get_parameter(name).shape) for name in names}
        indices = wrappings.local_indices(model, wrapping)
        model = wrappings.wrap(model, wrapping)
        targets = [target(wrappings.unwrapped(model), name) for name in names]
    report = prune.global_unstructured(targets, prune.RandomUnstructured, amount=0.3)
    masks = []
    for (module, parameter), name in zip(targets, names, strict=True):
        mask = getattr(module, parameter + "_mask")
        masks.append((wrappings.local(mask), indices[name], shapes[name]))
    return masks, report.num_pruned


def full_masks(per_rank) -> list[torch.Tensor]:
    per_parameter = zip(*(masks for masks, _ in per_rank), strict=True)
    return [assembled([(m, i) for m, i, _ in parts], parts[0][2]) for parts in per_parameter]


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_global_random_agrees_although_the_ranks_have_other_seeds(wrapping):
    per_rank = run_ranks(global_masks, wrappings.world_size(wrapping), wrapping, True, False)
    masks = full_masks(per_rank)
    num_elements = sum(mask.numel() for mask in masks)
    num_pruned = sum(int((mask == 0).sum()) for mask in masks)
    assert num_pruned == round(0.3 * num_elements)
    assert {reported for _, reported in per_rank} == {num_pruned}


def test_global_random_is_one_mask_on_any_sharding():
    found = {}
    for wrapping in ["fsdp2-2", *wrappings.sampled(wrappings.SHARDED)]:
        per_rank = run_ranks(global_masks, wrappings.world_size(wrapping), wrapping, False, False)
        found[wrapping] = torch.cat([mask.flatten() for mask in full_masks(per_rank)])
    differing = [w for w, mask in found.items() if not torch.equal(mask, found["fsdp2-2"])]
    assert not differing


def masks_of_equal_layers() -> list[torch.Tensor]:
    layers = [fully_shard(torch.nn.Linear(6, 10)) for _ in range(3)]
    torch.manual_seed(0)
    prune.global_unstructured(
        [(layer, "weight") for layer in layers], prune.RandomUnstructured, amount=0.5
    )
    return [layer.weight_mask.to_local() for layer in layers]


def test_parameters_of_one_shape_get_different_masks():
    masks = [torch.cat(parts) for parts in zip(*run_ranks(masks_of_equal_layers, 2), strict=True)]
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 3


def test_ddp_with_batch_norm_and_other_seeds():
    per_rank = run_ranks(global_masks, 3, "ddp-3", True, True)
    for mask in full_masks(per_rank):  # replicas are compared while they are put together
        assert 0 < int((mask == 0).sum()) < mask.numel()
