"""A pruning method of the user's own, on shards: it says how it may be run, or is refused."""

import re

import pytest
import torch
import torch.distributed as dist

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong_on, changes, snapshot, wrong_masks
from helpers.models import Net, fill, target

NAMES = ["l1.weight", "l3.bias", "l2.weight"]


class BelowLimit(prune.BasePruningMethod):
    """A function of each element alone."""

    PRUNING_TYPE = "unstructured"
    DISTRIBUTED = "elementwise"

    def __init__(self, limit):
        self.limit = limit

    def compute_mask(self, t, default_mask):
        return default_mask * (t.abs() >= self.limit)


class LowestSigned(prune.BasePruningMethod):
    """Scores of each element alone, compared over all; the most negative go first."""

    PRUNING_TYPE = "unstructured"
    DISTRIBUTED = "scores"

    def __init__(self, amount):
        self.amount = amount

    def compute_scores(self, t):
        return 3 * t


class Undeclared(prune.BasePruningMethod):
    """Says nothing about shards."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t, default_mask):
        return default_mask * (t.abs() >= 0.5)


class OtherOnEachRank(Undeclared):
    def compute_mask(self, t, default_mask):
        return default_mask * (t.abs() >= 0.5 + 0.3 * dist.get_rank())


class FailsOnOneRank(BelowLimit):
    def compute_mask(self, t, default_mask):
        if dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("this rank cannot")
        return super().compute_mask(t, default_mask)


class WrongShape(BelowLimit):
    def compute_mask(self, t, default_mask):
        return torch.ones(7)


def start(wrapping: str):
    dense = fill(Net(), "rounded", "float32")
    indices = wrappings.local_indices(dense, wrapping)
    model = wrappings.wrap(fill(Net(), "rounded", "float32"), wrapping)
    return model, dense, indices


def targets_of(model) -> list:
    return [target(wrappings.unwrapped(model), name) for name in NAMES]


def elementwise_differences(wrapping: str) -> list[str]:
    model, dense, indices = start(wrapping)
    keeps = {name: torch.ones(dense.get_parameter(name).shape).bool() for name in NAMES}
    for limit in (0.9, 0.5):  # what the first has pruned stays pruned
        prune.global_unstructured(targets_of(model), BelowLimit, limit=limit)
        keeps = {
            name: keep & (dense.get_parameter(name).abs() >= limit) for name, keep in keeps.items()
        }
    wrong = wrong_masks(model, keeps, indices, "global")
    BelowLimit.apply(*target(wrappings.unwrapped(model), "l3.weight"), limit=1.0)
    return wrong + wrong_masks(
        model, {"l3.weight": dense.l3.weight.abs() >= 1.0}, indices, "single"
    )


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_elementwise(wrapping):
    assert_nothing_wrong_on(wrapping, elementwise_differences)


def scores_differences(wrapping: str) -> list[str]:
    model, dense, indices = start(wrapping)
    values = [dense.get_parameter(name) for name in NAMES]
    keeps = None
    for amount in (0.3, 20):
        prune.global_unstructured(targets_of(model), LowestSigned, amount=amount)
        keeps = reference.prune(values, amount, keeps, key=float)
    wrong = wrong_masks(model, dict(zip(NAMES, keeps, strict=True)), indices, "global")
    (keep,) = reference.prune([dense.l3.weight], 0.5, key=float)
    LowestSigned.apply(*target(wrappings.unwrapped(model), "l3.weight"), amount=0.5)
    return wrong + wrong_masks(model, {"l3.weight": keep}, indices, "single")


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_scores(wrapping):
    assert_nothing_wrong_on(wrapping, scores_differences)


def error(wrapping: str, method: type, arguments: dict, single: bool):
    model, _, _ = start(wrapping)
    before = snapshot(model)
    try:
        if single:
            method.apply(*target(wrappings.unwrapped(model), "l1.weight"), **arguments)
        else:
            prune.global_unstructured(targets_of(model), method, **arguments)
        found = ("nothing", "")
    except Exception as raised:
        found = (type(raised).__name__, str(raised))
    return *found, changes(before, snapshot(model))


@pytest.mark.parametrize("single", [False, True], ids=["global", "single"])
@pytest.mark.parametrize("wrapping", ["fsdp2-1", "fsdp2-3", "tp-2", "hsdp-2x2", "fsdp2_tp-2x2"])
def test_undeclared_on_shards_is_refused_with_the_ways_out(wrapping, single):
    for kind, text, changed in run_ranks(
        error, wrappings.world_size(wrapping), wrapping, Undeclared, {}, single
    ):
        assert kind == "NotImplementedError", text
        assert all(word in text for word in ["Undeclared", "elementwise", "scores"]), text
        assert changed == []


def undeclared_differences(wrapping: str) -> list[str]:
    model, dense, indices = start(wrapping)
    prune.global_unstructured(targets_of(model), Undeclared)
    keeps = {name: dense.get_parameter(name).abs() >= 0.5 for name in NAMES}
    return wrong_masks(model, keeps, indices)


@pytest.mark.parametrize("wrapping", wrappings.REPLICATED)
def test_undeclared_on_replicas_runs_as_in_torch(wrapping):
    assert_nothing_wrong_on(wrapping, undeclared_differences)


@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-3"])
def test_undeclared_that_differs_between_replicas_is_an_error(wrapping):
    size = wrappings.world_size(wrapping)
    per_rank = run_ranks(error, size, wrapping, OtherOnEachRank, {}, False, timeout=20)
    assert {kind for kind, _, _ in per_rank} <= {"ValueError", "RuntimeError"}
    assert len({kind for kind, _, _ in per_rank}) == 1
    for _, text, changed in per_rank:
        assert re.search("OtherOnEachRank|weight|bias", text)
        assert changed == []


@pytest.mark.parametrize("single", [False, True], ids=["global", "single"])
@pytest.mark.parametrize("wrapping", ["fsdp2-3", "tp-2", "fsdp2_tp-2x2"])
def test_a_method_that_fails_on_one_rank_fails_on_all(wrapping, single):
    size = wrappings.world_size(wrapping)
    per_rank = run_ranks(error, size, wrapping, FailsOnOneRank, {"limit": 0.5}, single, timeout=20)
    assert {kind for kind, _, _ in per_rank} == {"RuntimeError"}
    assert all("this rank cannot" in text and not changed for _, text, changed in per_rank)


@pytest.mark.parametrize("wrapping", ["fsdp2-2", "ddp-2"])
def test_a_mask_of_the_wrong_shape_is_an_error(wrapping):
    per_rank = run_ranks(error, 2, wrapping, WrongShape, {"limit": 0.5}, False, timeout=20)
    assert len({kind for kind, _, _ in per_rank} - {"nothing"}) == 1
    assert all(kind != "nothing" and not changed for kind, _, changed in per_rank), per_rank
