"""global_mask, set_masks and get_masks on ranks that own different parameters."""

import re

import pytest
import torch
import torch.distributed as dist
from test_pipeline_stages import KINDS, NAMES, Deep, assert_parts_of, keeps_of, make_stage
from torch import nn

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.sampling import every

SIZE = 12 * 36 + 18  # elements of all weights


def chosen_of(kind: str, model: nn.Module) -> list:
    """This rank's parameters, in an order that is not that of other ranks."""
    chosen = (
        prune.select(model, everything=True) if kind != "uneven" or list(model.parameters()) else []
    )
    return chosen[:: -1 if dist.get_rank() % 2 else 1]


def selected(kind: str, data: str, k: int) -> tuple[list, dict]:
    """What global_mask selects, and its facts."""
    model, _, _ = make_stage(kind, data)
    chosen = chosen_of(kind, model)
    first = prune.global_mask(chosen, k, pipeline_parallel=True)
    masks = zip(chosen, first.masks, strict=True)
    found = [(pair.fqn, wrappings.local(mask)) for pair, mask in masks]
    return found, {"threshold": first.threshold, "ties": first.num_ties}


@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_is_that_of_one_process(kind):
    kind, size = kind.split("-")
    for data, k in every(2, [("normal", 200), ("few", 0), ("equal", 131)], int(size)):
        keeps = keeps_of(data, (SIZE - k,))
        per_rank = run_ranks(selected, int(size), kind, data, k)
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}
        for masks, facts in per_rank:
            assert facts == per_rank[0][1]
            for name, mask in masks:
                assert mask.dtype is torch.bool
                parts[name].append(mask)
        for name, keep in keeps.items():
            assert_parts_of(keep, parts[name], kind, name)


def by_scores(kind: str, ranked: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model, _, _ = make_stage(kind, "normal")
    pairs = prune.select(model, everything=True)
    scores = [pair[0].weight.detach().square() - 0.01 for pair in pairs]
    found = prune.global_mask(
        pairs, 150, scores="random" if ranked == "random" else scores, largest=False,
        signed=ranked == "signed", pipeline_parallel=True,
    )  # fmt: skip
    return {pair.fqn: mask for pair, mask in zip(pairs, found.masks, strict=True)}


@pytest.mark.parametrize("ranked", ["signed", "magnitudes", "random"])
def test_scores_over_stages(ranked):
    (expected,) = run_ranks(by_scores, 1, "whole", ranked)
    assert sum(int(mask.sum()) for mask in expected.values()) == 150
    masks = run_ranks(by_scores, 2, "plain", ranked)
    assert sorted(name for part in masks for name in part) == sorted(expected)
    for part in masks:
        for name, mask in part.items():
            assert torch.equal(mask, expected[name]), name


def wanted_masks() -> dict[str, torch.Tensor]:
    """Masks that drop and grow elements of those that "few" leaves at 40 %."""
    generator = torch.Generator().manual_seed(9)
    shapes = {name: parameter.shape for name, parameter in Deep().named_parameters()}
    return {name: torch.rand(shapes[name], generator=generator) < 0.6 for name in NAMES}


def replaced(kind: str) -> tuple[list, list]:
    """Masks, values and momenta after set_masks, by name; and the counts of its report."""
    model, _, _ = make_stage(kind, "few")
    chosen = chosen_of(kind, model)
    optimizer = None
    if chosen:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    prune.global_unstructured(chosen, prune.L1Unstructured, amount=0.4, pipeline_parallel=True)
    wanted = wanted_masks()
    given = [wanted[pair.fqn] for pair in chosen]
    report = prune.set_masks(chosen, given, optimizer=optimizer, pipeline_parallel=True)
    assert prune.verify(model, pipeline_parallel=True).ok
    after = []
    for pair, mask in zip(chosen, prune.get_masks(chosen), strict=True):
        original = wrappings.stored(*pair)
        momentum = optimizer.state[original]["momentum_buffer"]
        values = original.detach() * mask
        parts = [wrappings.local(t.detach()).clone() for t in (mask, values, momentum)]
        after.append((pair.fqn, *parts))
    return after, [(p.name, p.num_grown, p.num_pruned_now) for p in report.parameters]


@pytest.mark.parametrize("kind", ["plain-2", "whole-2", "uneven-3", "fsdp2-4", "tp-4"])
def test_masks_that_are_set_are_those_of_one_process(kind):
    ((expected, counts),) = run_ranks(replaced, 1, "whole")
    kind, size = kind.split("-")
    before, wanted = keeps_of("few", (0.4,)), wanted_masks()
    assert counts == [
        (n, int((wanted[n] & ~before[n]).sum()), int((before[n] & ~wanted[n]).sum())) for n in NAMES
    ]
    per_rank = run_ranks(replaced, int(size), kind)
    for position in range(3):  # mask, values, momentum
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}
        for after, seen in per_rank:
            assert seen == counts
            for name, *tensors in after:
                parts[name].append(tensors[position])
        for name, *tensors in expected:
            assert_parts_of(tensors[position], parts[name], kind, name)
            if position == 0:
                assert torch.equal(tensors[0], wanted[name])


def error_of(case: str) -> str:
    rank = dist.get_rank()
    model, _, _ = make_stage("plain", "normal")
    chosen = prune.select(model, everything=True)
    options = {"pipeline_parallel": True}
    k = 10
    if case == "no names":
        chosen = [tuple(pair) for pair in chosen]
    elif case == "twice":
        chosen = [
            *prune.select(nn.Linear(4, 4)),
            *prune.select(nn.Linear(4, 4)),
        ]
    elif case == "empty":
        chosen = []
    elif case == "other k":
        k = 10 + rank
    elif case == "candidates":
        options["candidates"] = [None] * len(chosen)
    elif case == "too many":
        k = SIZE + 1
    elif case == "one rank only":
        options["pipeline_parallel"] = rank == 0
    try:
        prune.global_mask(chosen, k, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


ERRORS = {
    "no names": "TypeError(.|\n)*select",
    "twice": "ValueError: weight is the name of two(.|\n)*prefix",
    "empty": "ValueError: parameters is empty on every rank",
    "other k": "ValueError(.|\n)*k(.|\n)*11",
    "candidates": "NotImplementedError: candidates",
    "too many": "ValueError: k is 451, and 450",
    "one rank only": "ValueError(.|\n)*pipeline_parallel",
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_the_same_on_every_rank(case):
    first, second = run_ranks(error_of, 2, case, timeout=30)
    assert first == second
    assert re.match(ERRORS[case], first), first
