"""Layers, rows and N:M groups lose what one process that sees every element prunes."""

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on, wrong_masks
from helpers.models import Net, fill, fqns, target

SIZES = (12, 24, 12, 5)  # columns that 1, 2, 3 and 4 ranks share evenly; 5 rows


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(2, 12, 5))  # [experts, in, out]


class LinearNet(Net):
    def __init__(self):
        super().__init__(SIZES)


class ConvolutionNet(LinearNet):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(12, 3, 2)


class GroupsNet(ConvolutionNet):
    """Net, and weights whose inputs lie along other dimensions; no forward uses these."""

    def __init__(self):
        super().__init__()
        self.turned = nn.ConvTranspose2d(12, 3, 2)
        self.experts = Experts()


INPUTS = {"conv.weight": (1, 2, 3), "turned.weight": (0, 2, 3), "experts.gate_up": (1,)}
# (data, dtype, arguments of successive calls)
CASES = [
    ("few", "float32", [{"scope": "row", "amount": 0.3}, {"scope": "row", "amount": 0.5}]),
    ("normal", "bfloat16", [{"scope": "row", "amount": 0.75}]),
    ("few", "float64", [{"scope": "layer", "amount": 0.35}, {"scope": "row", "amount": 0.5}]),
    ("equal", "float32", [{"pattern": "2:4"}]),
    ("few", "mixed", [{"pattern": "2:3"}, {"pattern": "1:4"}]),
    ("zeros", "float16", [{"scope": "layer", "amount": 0.5}, {"pattern": "1:2"}]),
]


def fits(shape, name: str, arguments: dict) -> bool:
    """Whether a call prunes a parameter; one with a pattern prunes no biases."""
    if "pattern" not in arguments or len(shape) == 1:
        return "pattern" not in arguments
    inputs = INPUTS.get(name, (1,))[0]
    return shape[inputs] % int(arguments["pattern"][2:]) == 0


def expected_masks(scores: dict, arguments: dict, keeps: dict) -> dict:
    masks = {}
    for name, score in scores.items():
        inputs = INPUTS.get(name, (1,)) if score.ndim > 1 else (0,)
        if "pattern" in arguments:
            n, m = map(int, arguments["pattern"].split(":"))
            groups, count = reference.groups_along(score.shape, inputs[0], m), m - n
        else:
            groups = [list(range(score.numel()))]
            if arguments["scope"] == "row":
                groups = reference.rows_of(score.shape, inputs)
            count = round(arguments["amount"] * len(groups[0]))
        masks[name] = reference.prune_in_blocks(score, groups, count, keeps.get(name))
    return masks


def differences(wrapping: str, net: type, cases: list) -> list[str]:
    wrong = []
    for number, (data, dtype, calls) in enumerate(cases):
        if dtype == "mixed" and wrappings.kind_of(wrapping).startswith("fsdp1"):
            dtype = "float32"  # a flat parameter has one dtype
        model = fill(net(), data, dtype, number)
        indices = wrappings.local_indices(model, wrapping)
        names = [
            name
            for name in fqns(model)
            if all(fits(model.get_parameter(name).shape, name, call) for call in calls)
        ]
        scores = {name: model.get_parameter(name).detach().clone() for name in names}
        model = wrappings.wrap(model, wrapping)
        pairs = [target(wrappings.unwrapped(model), name) for name in names]
        experts = {pair: 1 for pair in pairs if pair[1] == "gate_up"}
        keeps: dict = {}
        for arguments in calls:
            keeps = expected_masks(scores, arguments, keeps)
            gone = sum(int((~keep).sum()) for keep in keeps.values())
            report = prune.global_unstructured(
                pairs, prune.L1Unstructured, input_dims=experts or None, **arguments
            )
            when = f"{data} {dtype} {arguments} of {calls}"
            wrong += wrong_masks(model, keeps, indices, when)
            if report.num_pruned != gone:
                wrong.append(f"{when}: {report.num_pruned} pruned, not {gone}")
    return wrong


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_equal_to_one_process(wrapping):
    size, number = wrappings.world_size(wrapping), wrappings.ALL.index(wrapping)
    cases = CASES if size < 3 else CASES[number % 2 :: 2]
    # Without use_orig_params, FSDP1 leaves other modules to the root.
    net = ConvolutionNet if wrappings.kind_of(wrapping) == "fsdp1_flat" else GroupsNet
    assert_nothing_wrong(run_ranks(differences, size, wrapping, net, cases))


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.FSDP2_DIM1))
def test_shards_of_columns(wrapping):
    assert_nothing_wrong_on(wrapping, differences, LinearNet, CASES)
