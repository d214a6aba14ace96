"""Layers, rows, N:M groups and tiles lose what one process that sees every element prunes.

Tiles are ranked by exact sums.
"""

import pytest
import torch
from torch import nn

import distprune as prune
from distprune._common.hashing import draw_seed, hash_keys
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on, wrong_masks
from helpers.models import Net, fill, fqns, target
from helpers.sampling import every

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
OUTPUTS = {"conv.weight": 0, "turned.weight": 1, "experts.gate_up": 2}
# (data, dtype, arguments of successive calls)
CASES = [
    ("few", "float32", [{"scope": "row", "amount": 0.3}, {"scope": "row", "amount": 0.5}]),
    ("normal", "bfloat16", [{"scope": "row", "amount": 0.75}]),
    ("few", "float64", [{"scope": "layer", "amount": 0.35}, {"scope": "row", "amount": 0.5}]),
    ("equal", "float32", [{"pattern": "2:4"}]),
    ("few", "mixed", [{"pattern": "2:3"}, {"pattern": "1:4"}]),
    ("zeros", "float16", [{"scope": "layer", "amount": 0.5}, {"pattern": "1:2"}]),
]
CASES_OF_TILES = [
    ("few", "float32", [{"pattern": "1x4", "amount": 0.4}, {"pattern": "1x3", "amount": 20}]),
    ("normal", "float32", [{"pattern": "4x4", "amount": 0.5}]),
    ("few", "bfloat16", [{"pattern": "3x2", "scope": "row", "amount": 0.3}]),
    ("normal", "float64", [{"pattern": "2x3", "scope": "layer", "amount": 0.35}]),
    ("equal", "float32", [{"pattern": "4x6", "amount": 0.5}]),
    ("inf", "float16", [{"pattern": "2x2", "amount": 0.6}]),
    ("few", "mixed", [{"pattern": "1x6", "scope": "row", "amount": 0.5}, {"pattern": "2:3"}]),
    ("denormal", "float32", [{"pattern": "12x12", "amount": 1}]),
    (
        "zeros",
        "float32",
        [{"pattern": "2:4"}, {"pattern": "4x2", "amount": 0.25}, {"scope": "row", "amount": 0.7}],
    ),
    ("normal", "float32", [{"pattern": "3x4", "amount": 0.5, "method": "random"}]),
    ("few", "float32", [{"pattern": "2x4", "scope": "layer", "amount": 0.5, "method": "random"}]),
    ("few", "float32", [{"pattern": "1x2", "scope": "row", "amount": 0.5, "method": "lowest"}]),
    ("normal", "float32", [{"pattern": "2x2", "amount": 0.5, "method": "lowest"}]),
]
METHODS = {
    "magnitude": prune.L1Unstructured,
    "random": prune.RandomUnstructured,
    "lowest": prune.LowestScore,
}


def tile_of(arguments: dict) -> tuple[int, int] | None:
    outputs, x, inputs = arguments.get("pattern", "").partition("x")
    return (int(outputs), int(inputs)) if x else None


def fits(shape, name: str, arguments: dict) -> bool:
    """Whether a call prunes a parameter; one with a pattern prunes no biases."""
    if "pattern" not in arguments or len(shape) == 1:
        return "pattern" not in arguments
    inputs = INPUTS.get(name, (1,))[0]
    if (tile := tile_of(arguments)) is not None:
        return shape[OUTPUTS.get(name, 0)] % tile[0] == 0 and shape[inputs] % tile[1] == 0
    return shape[inputs] % int(arguments["pattern"][2:]) == 0


def masks_of_groups(scores: dict, arguments: dict, keeps: dict) -> dict:
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


def expected_masks(scores: dict, arguments: dict, keeps: dict, seed: int) -> dict:
    if tile_of(arguments) is None:
        return masks_of_groups(scores, arguments, keeps)
    method = arguments.get("method", "magnitude")
    tiles, sums, live, offset = {}, {}, {}, 0
    for name, score in scores.items():
        inputs, outputs = INPUTS.get(name, (1,))[0], OUTPUTS.get(name, 0)
        tiles[name] = reference.tiles_of(score.shape, inputs, outputs, tile_of(arguments))
        keep = keeps.get(name, torch.ones(score.shape, dtype=torch.bool))
        live[name] = keep.flatten()[tiles[name]].any(-1)
        key = abs if method == "magnitude" else float
        sums[name] = reference.tile_scores(score, tiles[name], keep, key)
        if method == "random":
            count = sums[name].numel()
            sums[name] = hash_keys(torch.arange(offset, offset + count), seed).view(
                live[name].shape
            )
            offset += count
    if method == "random":  # ranks: float64 does not have 63 bits
        order = torch.cat([own.flatten() for own in sums.values()]).argsort().argsort()
        parts = order.split([own.numel() for own in sums.values()])
        sums = {n: part.view(sums[n].shape) for n, part in zip(sums, parts, strict=True)}
    names, amount = list(scores), arguments["amount"]
    if arguments.get("scope", "global") == "global":
        kept = reference.prune(
            [sums[n] for n in names], amount, [live[n] for n in names], key=float
        )
        kept = dict(zip(names, kept, strict=True))
    else:
        kept = {}
        for name in names:
            groups = [list(range(sums[name].numel()))]
            if arguments["scope"] == "row":
                groups = reference.rows_of(sums[name].shape, INPUTS.get(name, (1,)))
            count = round(amount * len(groups[0]))
            kept[name] = reference.prune_in_blocks(sums[name], groups, count, live[name], key=float)
    masks = {}
    for name in names:
        mask = keeps.get(name, torch.ones(scores[name].shape, dtype=torch.bool)).clone()
        mask.view(-1)[tiles[name][~kept[name]].flatten()] = False
        masks[name] = mask
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
            torch.manual_seed(5)
            seed = int(draw_seed())
            torch.manual_seed(5)
            keeps = expected_masks(scores, arguments, keeps, seed)
            gone = sum(int((~keep).sum()) for keep in keeps.values())
            given = dict(arguments)
            method = given.pop("method", "magnitude")
            own = dict(zip(pairs, scores.values(), strict=True)) if method == "lowest" else None
            report = prune.global_unstructured(
                pairs, METHODS[method], own, input_dims=experts or None, **given
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
    cases = [*cases, *every(3, CASES_OF_TILES, number)]
    assert_nothing_wrong(run_ranks(differences, size, wrapping, net, cases))


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.FSDP2_DIM1))
def test_shards_of_columns(wrapping):
    cases = [*CASES, *every(3, CASES_OF_TILES, wrappings.FSDP2_DIM1.index(wrapping))]
    assert_nothing_wrong_on(wrapping, differences, LinearNet, cases)


def pruned_before_it_is_sharded(wrapping: str) -> list[str]:
    """The mask in force is a whole one, of the weight's dtype, until new masks are written."""
    call = {"pattern": "2x2", "amount": 0.5}
    alone, sharded = (fill(LinearNet(), "normal", "float32", 3) for _ in range(2))
    indices = wrappings.local_indices(alone, wrapping)
    names = [name for name in fqns(alone) if fits(alone.get_parameter(name).shape, name, call)]
    scores = {name: alone.get_parameter(name).detach().clone() for name in names}
    keeps = {}
    for name in names:
        module, own = target(sharded, name)
        prune.l1_unstructured(module, own, amount=0.2)
        keeps[name] = getattr(module, own + "_mask").bool()
    sharded = wrappings.wrap(sharded, wrapping)
    pairs = [target(wrappings.unwrapped(sharded), name) for name in names]
    prune.global_unstructured(pairs, prune.L1Unstructured, **call)
    keeps = expected_masks(scores, call, keeps, 0)
    assert any(not keep.all() for keep in keeps.values())
    return wrong_masks(sharded, keeps, indices)


@pytest.mark.parametrize("wrapping", ["fsdp2-1", "fsdp2-2"])
def test_pruned_before_it_is_sharded(wrapping):
    assert_nothing_wrong_on(wrapping, pruned_before_it_is_sharded)
