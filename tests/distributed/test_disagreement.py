"""Ranks that disagree all raise the same error, soon, and no module changes on any of them."""

import re
from collections.abc import Sequence
from itertools import product

import pytest
import torch
import torch.distributed as dist

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong_on, changes, kind_of, snapshot, wrong_masks
from helpers.models import Net, fill, target
from helpers.sampling import every

NAMES = ["l1.weight", "l2.weight", "l2.bias", "l3.weight"]
SECONDS = 40  # to agree on the error; a hang would take the whole of it


def odd_arguments(case: str, targets: list, arguments: dict) -> tuple[list, dict]:
    """What the odd rank passes instead."""
    match case:
        case "amount":
            arguments["amount"] = 0.4
        case "amount of another type":
            arguments["amount"] = 1
        case "amount out of range":
            arguments["amount"] = -0.1
        case "amount missing":
            del arguments["amount"]
        case "unknown argument":
            arguments["amuont"] = arguments.pop("amount")
        case "method":
            arguments["pruning_method"] = prune.RandomUnstructured
        case "structured method":
            arguments["pruning_method"] = prune.LnStructured
        case "fewer parameters":
            targets = targets[:-1]
        case "no parameters":
            targets = []
        case "order":
            targets = targets[::-1]
        case "another parameter":
            targets[2] = (targets[3][0], "bias")
        case "missing attribute":
            targets[1] = (targets[1][0], "weigth")
        case "scores":
            arguments["importance_scores"] = {targets[0]: torch.ones(10, 6)}
        case "scores of another shape":
            arguments["importance_scores"] = {targets[0]: torch.ones(10, 7)}
        case "scores are no dict":
            arguments["importance_scores"] = [torch.ones(10, 6)]
        case "name in the way":
            targets[3][0].weight_mask = "an attribute of the user's own"
        case _:
            raise ValueError(f"no such case: {case!r}")
    return targets, arguments


def outcomes(wrapping: str, case: str) -> list[tuple[str, str, list[str]]]:
    """What this rank sees when the first rank is the odd one, and when the last one is."""
    return [outcome(wrapping, case, odd) for odd in (0, dist.get_world_size() - 1)]


def outcome(wrapping: str, case: str, odd_rank: int) -> tuple[str, str, list[str]]:
    """(type, text, changes) of the error that this rank sees."""
    model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping)
    targets = [target(wrappings.unwrapped(model), name) for name in NAMES]
    amount = 1.0 if case == "amount of another type" else 0.5
    arguments = {"pruning_method": prune.L1Unstructured, "amount": amount}
    if dist.get_rank() == odd_rank:
        targets, arguments = odd_arguments(case, targets, arguments)
    return error_of(model, targets, arguments)


def error_of(model, targets: list, arguments: dict) -> tuple[str, str, list[str]]:
    before = snapshot(model)
    try:
        prune.global_unstructured(targets, **arguments)
        error = ("nothing", "")
    except Exception as raised:
        error = (kind_of(raised), str(raised))
    return *error, changes(before, snapshot(model))


def assert_same_error(per_rank: Sequence, kind: str, text: str) -> None:
    """Every rank raised this kind of error, its text begins as expected, and nothing changed."""
    assert {each for each, _, _ in per_rank} == {kind}, per_rank
    assert [message for _, message, _ in per_rank if not re.match(text, message)] == []
    assert [changed for _, _, changed in per_rank if changed] == []


def differ(fact: str, usual: str, odd: str) -> str:
    """What the text says of a fact in which one rank differs: expressions for both values."""
    orders = [rf"{one}; rank \d has {fact}: {other}" for one, other in ((usual, odd), (odd, usual))]
    return (
        "the ranks were called with different arguments: "
        rf"rank 0 has {fact}: ({'|'.join(orders)})\. Expected the same parameters"
    )


def on_rank(text: str) -> str:
    return rf"on rank \d: {text}"


REST = "[^;]*"  # of what is said about a parameter
NOT_NUMBERS = r"the scores of \w*Linear\.weight \(#1\) \([1-9]\d* of 50\) are NaN; expected numbers"
REPLICAS_DIFFER = r"{} the ranks hold replicas of this parameter \(or of its scores or mask\) that"
CASES = {  # case -> (type of the error, how its text begins on every rank)
    "amount": ("ValueError", differ("amount", r"0\.5", r"0\.4")),
    "amount of another type": ("ValueError", differ("amount", r"1\.0", "1")),
    "amount out of range": ("ValueError", on_rank(r"amount=-0\.1 is not in \[0, 1\]; expected")),
    "amount missing": ("TypeError", on_rank(r"\w+\.__init__\(\) missing .* 'amount'")),
    "unknown argument": (
        "TypeError",
        on_rank(r"\w+\.__init__\(\) got an unexpected keyword argument 'amuont'"),
    ),
    "method": (
        "ValueError",
        differ("pruning method", r"\S+\.L1Unstructured", r"\S+\.RandomUnstructured"),
    ),
    "structured method": ("TypeError", on_rank(r"LnStructured\.__init__\(\) missing .* 'n'")),
    "fewer parameters": ("ValueError", differ("number of parameters", "4", "3")),
    "no parameters": ("ValueError", on_rank("parameters is empty; expected at least one")),
    "order": (
        "ValueError",
        differ(r"\w*Linear\.weight \(#0\)", rf"shape \(10, 6\){REST}", rf"shape \(3, 5\){REST}"),
    ),
    "another parameter": (
        "ValueError",
        differ(r"\w*Linear\.bias \(#2\)", rf"shape \(5,\){REST}", rf"shape \(3,\){REST}"),
    ),
    "missing attribute": ("AttributeError", on_rank(r"'\w*Linear' object has no .* 'weigth'")),
    "scores": (
        "ValueError",
        differ(
            r"\w*Linear\.weight \(#0\)",
            rf"{REST}, importance scores: none",
            rf"{REST}, importance scores: torch\.float32, checksum {REST}",
        ),
    ),
    "scores of another shape": (
        "ValueError",
        on_rank(r"\w*Linear\.weight \(#0\): importance_scores has shape \(10, 7\); expected"),
    ),
    "scores are no dict": ("TypeError", on_rank("importance_scores is a list; expected a dict")),
    "name in the way": (
        "KeyError",
        ".*" + on_rank(r".*\w*Linear has an attribute .*'weight_mask.*' already; expected none"),
    ),
}


@pytest.mark.parametrize(
    ("wrapping", "case"),
    [
        *product(["plain-2", "fsdp2-3"], CASES),
        *(("ddp-3", case) for case in every(3, CASES, 0)),
        *(("tp-2", case) for case in every(3, CASES, 1)),
        *(("hsdp-2x2", case) for case in every(3, CASES, 2)),
    ],
)
def test_one_rank_with_other_arguments(wrapping, case):
    size = wrappings.world_size(wrapping)
    per_rank = run_ranks(outcomes, size, wrapping, case, timeout=SECONDS)
    for of_one_odd_rank in zip(*per_rank, strict=True):
        assert_same_error(of_one_odd_rank, *CASES[case])


@torch.no_grad()
def outcome_with_nan(wrapping: str, odd_rank: int | None) -> tuple[str, str, list[str]]:
    """NaN in l2.weight among the elements that one rank holds; None: in those of each rank."""
    indices = wrappings.local_indices(fill(Net(), "normal", "float32"), wrapping)
    model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping)
    targets = [target(wrappings.unwrapped(model), name) for name in NAMES]
    if odd_rank in (dist.get_rank(), None):
        wrappings.shard(model, NAMES[1], indices)[:1] = torch.nan
    return error_of(model, targets, {"pruning_method": prune.L1Unstructured, "amount": 0.5})


@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-3", "hsdp-2x2"])
def test_nan_in_one_replica(wrapping):
    for odd_rank in (0, wrappings.world_size(wrapping) - 1):
        per_rank = run_ranks(
            outcome_with_nan, wrappings.world_size(wrapping), wrapping, odd_rank, timeout=SECONDS
        )
        assert_same_error(
            per_rank, "ValueError", REPLICAS_DIFFER.format(r"\w*Linear\.weight \(#1\):")
        )


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_nan_in_every_replica(wrapping):
    per_rank = run_ranks(outcome_with_nan, wrappings.world_size(wrapping), wrapping, None)
    assert_same_error(per_rank, "ValueError", NOT_NUMBERS)


@pytest.mark.parametrize("wrapping", ["fsdp2-3", "fsdp2_root-2", "tp-2"])
def test_nan_on_one_rank(wrapping):
    for odd_rank in (0, wrappings.world_size(wrapping) - 1):
        per_rank = run_ranks(
            outcome_with_nan, wrappings.world_size(wrapping), wrapping, odd_rank, timeout=SECONDS
        )
        assert_same_error(per_rank, "ValueError", NOT_NUMBERS)


@torch.no_grad()
def differences_with_pruned_nan(wrapping: str) -> list[str]:
    """NaN wherever the first pruning has put the mask to 0."""
    dense = fill(Net(), "normal", "float32")
    indices = wrappings.local_indices(dense, wrapping)
    model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping)
    targets = [target(wrappings.unwrapped(model), name) for name in NAMES]
    scores = [dense.get_parameter(name) for name in NAMES]
    prune.global_unstructured(targets, prune.L1Unstructured, amount=0.5)
    for module, name in targets:
        mask, orig = getattr(module, name + "_mask"), wrappings.stored(module, name)
        wrappings.local(orig)[wrappings.local(mask) == 0] = torch.nan
    prune.global_unstructured(targets, prune.L1Unstructured, amount=0.5)
    keeps = reference.prune(scores, 0.5, reference.prune(scores, 0.5))
    return wrong_masks(model, dict(zip(NAMES, keeps, strict=True)), indices)


@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-2", "fsdp2-3", "tp-2", "fsdp2_tp-2x2"])
def test_nan_among_the_pruned_elements_is_no_error(wrapping):
    assert_nothing_wrong_on(wrapping, differences_with_pruned_nan)


@torch.no_grad()
def outcome_with_other_replica(wrapping: str, what: str, shift: int) -> tuple[str, str, list[str]]:
    """The last rank holds the same numbers as its replicas, but in another order."""
    model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping)
    targets = [target(wrappings.unwrapped(model), name) for name in NAMES]
    odd = dist.get_rank() == dist.get_world_size() - 1
    module = targets[0][0]
    mask = (torch.arange(60) ** 2 % 7 > 2).view(10, 6)  # no roll by less than 7 maps it to itself
    if what == "mask":
        prune.custom_from_mask(module, "weight", mask.roll(shift if odd else 0))
    elif odd:
        weight = wrappings.local(module.weight)
        weight.copy_(weight.flatten().roll(shift).view_as(weight))
    return error_of(model, targets, {"pruning_method": prune.L1Unstructured, "amount": 0.5})


@pytest.mark.parametrize("shift", [1, 2, 6])
@pytest.mark.parametrize(
    ("wrapping", "what"),
    [(w, "values") for w in ("plain-2", "ddp-3", "hsdp-2x1", "hsdp-2x2")]
    + [(w, "mask") for w in ("plain-2", "ddp-3")],
)
def test_replicas_in_another_order(wrapping, what, shift):
    """As after random_unstructured under DDP with another seed on each rank."""
    size = wrappings.world_size(wrapping)
    per_rank = run_ranks(outcome_with_other_replica, size, wrapping, what, shift, timeout=SECONDS)
    assert_same_error(per_rank, "ValueError", REPLICAS_DIFFER.format(r"\w*Linear\.weight \(#0\):"))


def outcome_with_other_mask(wrapping: str) -> tuple[str, str, list[str]]:
    """custom_from_mask, with a whole mask that the last rank has in another order."""
    model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping)
    mask = (torch.arange(60) % 3 > 0).view(10, 6)
    odd = dist.get_rank() == dist.get_world_size() - 1
    before = snapshot(model)
    try:
        prune.custom_from_mask(model.l1, "weight", mask.roll(2 if odd else 0))
        error = ("nothing", "")
    except Exception as raised:
        error = (type(raised).__name__, str(raised))
    return *error, changes(before, snapshot(model))


@pytest.mark.parametrize("wrapping", ["hsdp-2x1", "hsdp-2x2"])
def test_replicas_given_other_masks(wrapping):
    """Else the replicas of one parameter would drift apart."""
    size = wrappings.world_size(wrapping)
    per_rank = run_ranks(outcome_with_other_mask, size, wrapping, timeout=SECONDS)
    assert_same_error(
        per_rank, "ValueError", differ(r"checksum of the mask of \w+\.weight", r"-?\d+", r"-?\d+")
    )


def outcome_with_other_model(wrapping: str, case: str) -> tuple[str, str, list[str]]:
    """The last rank has the same parameters in another dtype or another shape."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    sizes = (6, 10, 7, 3) if odd and case == "shape" else (6, 10, 5, 3)
    dtype = "float64" if odd and case == "dtype" else "float32"
    model = wrappings.wrap(fill(Net(sizes), "normal", dtype), wrapping)
    targets = [target(wrappings.unwrapped(model), name) for name in NAMES]
    return error_of(model, targets, {"pruning_method": prune.L1Unstructured, "amount": 0.5})


@pytest.mark.parametrize("case", ["dtype", "shape"])
@pytest.mark.parametrize("wrapping", ["plain-2", "plain-3", "fsdp2-2"])
def test_one_rank_with_another_model(wrapping, case):
    per_rank = run_ranks(
        outcome_with_other_model, wrappings.world_size(wrapping), wrapping, case, timeout=SECONDS
    )
    if case == "dtype":
        values = (
            rf"shape \(10, 6\), dtype torch\.{dtype}, {REST}" for dtype in ("float32", "float64")
        )
        text = differ(r"\w*Linear\.weight \(#0\)", *values)
    else:
        values = (rf"shape \({rows}, 10\), {REST}" for rows in (5, 7))
        text = differ(r"\w*Linear\.weight \(#1\)", *values)
    assert_same_error(per_rank, "ValueError", text)


def outcome_single(wrapping: str, amount_of_odd: object) -> tuple[str, str, list[str]]:
    """The same promise for one sharded parameter."""
    model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping)
    module = wrappings.unwrapped(model).l1
    odd = dist.get_rank() == dist.get_world_size() - 1
    before = snapshot(model)
    try:
        prune.l1_unstructured(module, "weight", amount_of_odd if odd else 0.5)
        error = ("nothing", "")
    except Exception as raised:
        error = (type(raised).__name__, str(raised))
    return *error, changes(before, snapshot(model))


@pytest.mark.parametrize("amount", [0.4, 1, -1, 2.5])
@pytest.mark.parametrize("wrapping", ["fsdp2-3", "tp-2", "hsdp-2x2", "fsdp2_tp-2x2"])
def test_one_sharded_parameter(wrapping, amount):
    """Ranks of the mesh of the parameter disagree; every rank of a mesh with the odd one raises."""
    size = wrappings.world_size(wrapping)
    per_rank = run_ranks(outcome_single, size, wrapping, amount, timeout=SECONDS)
    text = {
        0.4: differ("amount", r"0\.5", r"0\.4"),
        1: differ("amount", r"0\.5", "1"),
        -1: on_rank("amount=-1 is negative; expected a count >= 0"),
        2.5: on_rank(r"amount=2\.5 is not in \[0, 1\]; expected"),
    }[amount]
    assert_same_error(per_rank, "ValueError", text)
