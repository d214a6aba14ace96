"""Scopes and patterns of every kind of score: each rank has its part of one process's masks."""

import functools

import pytest
import torch

import distprune as prune
from distprune import schedule
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on, snapshot, wrong_masks
from helpers.models import Net, fill, target

SIZES = (12, 24, 12, 5)
NAMES = ["l3.weight", "l1.weight", "l2.weight"]
WAYS = [
    {"scope": "layer", "amount": 0.4},
    {"scope": "row", "amount": 0.4},
    {"pattern": "3:4"},
]
SAMPLE = [
    "plain-1",
    "ddp-2",
    "fsdp2-3",
    "fsdp1-2",
    "fsdp1_flat-2",
    "fsdp2_dim1-2",
    "tp-2",
    "hsdp-2x2",
]


def prune_by(kind: str, model, pairs: list, scores: list, way: dict):
    given = dict(zip(pairs, scores, strict=True))
    call = functools.partial(prune.global_unstructured, pairs, **way)
    match kind:
        case "tensors":
            return call(prune.L1Unstructured, importance_scores=given)
        case "normalised":
            return call(prune.L1Unstructured, importance_scores=given, normalize="rms")
        case "signed":
            return call(prune.LowestScore, importance_scores=given)
        case "factors":
            factored = {
                pair: prune.FactoredScores([[s[:1].abs() + 1, s[:, :1].abs()]])
                for pair, s in given.items()
            }
            return call(prune.L1Unstructured, importance_scores=factored)
    torch.manual_seed(3)
    return call(prune.RandomUnstructured)


def scores_of(model) -> list:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(-4, 5, model.get_parameter(name).shape, generator=generator) / 2
        for name in NAMES
    ]


KINDS = ["tensors", "normalised", "signed", "factors", "random"]


def masks_of_one_process(way: dict) -> dict:
    masks = {}
    for kind in KINDS:
        model = fill(Net(SIZES), "few", "float32")
        pairs = [target(model, name) for name in NAMES]
        prune_by(kind, model, pairs, scores_of(model), way)
        masks[kind] = {n: getattr(m, p + "_mask") for n, (m, p) in zip(NAMES, pairs, strict=True)}
    return masks


def differences(wrapping: str, expected: list) -> list[str]:
    wrong = []
    for way, masks in zip(WAYS, expected, strict=True):
        for kind, of_kind in masks.items():
            model = fill(Net(SIZES), "few", "float32")
            scores = scores_of(model)
            indices = wrappings.local_indices(model, wrapping)
            model = wrappings.wrap(model, wrapping)
            pairs = [target(wrappings.unwrapped(model), name) for name in NAMES]
            prune_by(kind, model, pairs, scores, way)
            wrong += wrong_masks(model, of_kind, indices, f"{kind} {way}")
    return wrong


@pytest.fixture(scope="module")
def expected():
    """Of one rank with a process group, where random numbers are those of any sharding."""
    return [run_ranks(masks_of_one_process, 1, way)[0] for way in WAYS]


@pytest.mark.parametrize("wrapping", SAMPLE)
def test_equal_to_one_process(wrapping, expected):
    assert_nothing_wrong_on(wrapping, differences, expected)


def complaints_about_nan(wrapping: str) -> list[str]:
    """What is wrong where one rank alone has a NaN: an error with its name on every rank."""
    wrong = []
    for way in WAYS:
        model = fill(Net(SIZES), "normal", "float32")
        with torch.no_grad():
            model.l2.weight[11, 11] = torch.nan
        model = wrappings.wrap(model, wrapping)
        pairs = [target(wrappings.unwrapped(model), name) for name in NAMES]
        before = snapshot(model)
        try:
            prune.global_unstructured(pairs, prune.L1Unstructured, **way)
        except ValueError as error:
            if "l2.weight" not in str(error) and "#2" not in str(error):
                wrong.append(f"{way}: {error}")
        else:
            wrong.append(f"{way}: no error")
        after = snapshot(model)
        if after.keys() != before.keys():
            wrong.append(f"{way}: modules changed")
    return wrong


@pytest.mark.parametrize("wrapping", ["fsdp2-3", "tp-2", "fsdp1-2"])
def test_a_nan_of_one_rank_is_an_error_on_all(wrapping):
    assert_nothing_wrong_on(wrapping, complaints_about_nan)


def complaints_about_other_ways(wrapping: str) -> list[str]:
    """Ranks that pass another scope, or other input dimensions, all get an error."""
    rank = torch.distributed.get_rank()
    wrong = []
    for ways in (
        [{"scope": "row", "amount": 0.5}, {"scope": "layer", "amount": 0.5}],
        [{"pattern": "2:4"}, {"pattern": "1:4"}],
        [{"pattern": "1:2"}, {"pattern": "1:2", "input_dims": {"l2.*": 0}}],
    ):
        model = wrappings.wrap(fill(Net(SIZES), "normal", "float32"), wrapping)
        pairs = prune.select(model)
        before = snapshot(model)
        try:
            prune.global_unstructured(pairs, prune.L1Unstructured, **ways[min(rank, 1)])
        except ValueError:
            pass
        else:
            wrong.append(f"{ways}: no error")
        if snapshot(model).keys() != before.keys():
            wrong.append(f"{ways}: modules changed")
    return wrong


@pytest.mark.parametrize("wrapping", ["plain-2", "fsdp2-2", "tp-2"])
def test_ranks_that_differ_in_scope_or_pattern_all_fail(wrapping):
    assert_nothing_wrong(run_ranks(complaints_about_other_ways, 2, wrapping))


def complaints_about_states() -> list[str]:
    """A rank that loaded another state would take no part in the pruning."""
    model = fill(Net(SIZES), "normal", "float32")
    steps = schedule.Linear(0, 4, 1, 0.5)
    pruner = schedule.ScheduledPruner(prune.select(model), steps, scope="row")
    state = pruner.state_dict() | {"num_steps": 2}
    if torch.distributed.get_rank():
        state["sparsity"] = 0.25
    pruner.load_state_dict(state)
    try:
        pruner.step()
    except ValueError as error:
        return [] if "present sparsity" in str(error) else [str(error)]
    return ["no error"]


def test_ranks_with_other_states_all_fail():
    assert_nothing_wrong(run_ranks(complaints_about_states, 2))


def differences_of_stages() -> list[str]:
    """Each rank has a layer of its own, and one is on both."""
    rank = torch.distributed.get_rank()
    alone = [torch.distributed.new_group([other]) for other in range(2)][rank]
    wrong = []
    for way in WAYS:
        whole = fill(Net(SIZES), "few", "float32")
        prune.global_unstructured(prune.select(whole), prune.L1Unstructured, group=alone, **way)
        stage = fill(Net(SIZES), "few", "float32")
        mine = {"l1.weight", "l2.weight"} if rank == 0 else {"l2.weight", "l3.weight"}
        pairs = [pair for pair in prune.select(stage) if pair.fqn in mine]
        report = prune.global_unstructured(
            pairs, prune.L1Unstructured, pipeline_parallel=True, **way
        )
        if len(report.parameters) != 3:
            wrong.append(f"{way}: {report}")
        for name in mine:
            (held, own), (full, _) = target(stage, name), target(whole, name)
            if not torch.equal(getattr(held, own + "_mask"), getattr(full, own + "_mask")):
                wrong.append(f"{way}: {name}")
    return wrong


def test_stages_of_a_pipeline():
    assert_nothing_wrong(run_ranks(differences_of_stages, 2))
