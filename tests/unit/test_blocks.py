"""Blocks lose their lowest elements by any kernel, whatever their form; equal ones go by index."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import distprune as prune
from distprune.base import memory
from distprune.base.blocks import Blocks
from distprune.base.memory import Scratch
from distprune.ranking import chunks, cpu, in_blocks
from distprune.ranking.in_blocks import lowest_of
from helpers import reference
from helpers.models import values

CASES = [
    (nn.Linear(12, 7), (1,)),
    (nn.Conv2d(12, 5, 3), (1, 2, 3)),
    (nn.ConvTranspose2d(12, 5, 2), (0, 2, 3)),
    (nn.Conv1d(24, 6, 2, groups=2), (1, 2)),
]


WAYS = ["blocks", "no block fits", "small chunks", "threads", "other device", "channels_last"]


@pytest.fixture(params=WAYS)
def how(request, monkeypatch, device):
    if device.type != "cpu" and request.param in ("small chunks", "threads", "other device"):
        pytest.skip("is about a CPU")
    if request.param == "no block fits":
        monkeypatch.setattr(in_blocks, "_MAX_BAND", 1)
        monkeypatch.setattr(in_blocks, "_CHUNK", 7)
    elif request.param == "small chunks":
        monkeypatch.setattr(cpu, "CHUNK_BYTES", 240)
    elif request.param == "threads":
        monkeypatch.setattr(cpu, "CHUNK_BYTES", 240)
        monkeypatch.setattr(chunks, "_THREADED_CHUNK", 0)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    elif request.param == "other device":
        monkeypatch.setattr(memory, "takes_numpy", lambda device: False)
    return request.param


@pytest.mark.parametrize("data", ["few", "equal", "normal"])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_equal_to_the_oracle(how, data, number, device):
    layer, inputs = CASES[number]
    generator = torch.Generator().manual_seed(number)
    weight = values(data, layer.weight.shape, torch.float32, generator)
    keep, layer = None, copy.deepcopy(layer)
    if how == "channels_last" and weight.ndim == 4:
        layer = layer.to(memory_format=torch.channels_last)
    layer = layer.to(device)
    with torch.no_grad():
        layer.weight.copy_(weight)
    for arguments in ({"scope": "row", "amount": 0.4}, {"pattern": "1:3"}, {"pattern": "1:4"}):
        if "pattern" in arguments:
            n, m = map(int, arguments["pattern"].split(":"))
            groups, count = reference.groups_along(weight.shape, inputs[0], m), m - n
        else:
            groups = reference.rows_of(weight.shape, inputs)
            count = round(0.4 * len(groups[0]))
        keep = reference.prune_in_blocks(weight, groups, count, keep)
        prune.global_unstructured([(layer, "weight")], prune.L1Unstructured, **arguments)
        assert torch.equal(layer.weight_mask.bool().cpu(), keep), arguments


@pytest.mark.parametrize("arguments", [{"scope": "row", "amount": 0.5}, {"pattern": "2:4"}])
def test_nan_is_refused_unless_it_is_pruned_already(how, arguments, device):
    layer = nn.Linear(8, 3, device=device)
    with torch.no_grad():
        layer.weight[1, 2] = layer.weight[2, 5] = torch.nan
    pairs = [(layer, "weight")]
    with pytest.raises(ValueError, match=r"weight.*\(2 of 24\)"):
        prune.global_unstructured(pairs, prune.L1Unstructured, **arguments)
    assert not hasattr(layer, "weight_mask")
    prune.custom_from_mask(layer, "weight", ~layer.weight.isnan())
    report = prune.global_unstructured(pairs, prune.L1Unstructured, **arguments)
    assert report.num_pruned == 12 and int(layer.weight_mask.sum()) == 12


def test_a_transposed_convolution_with_groups_sums_over_the_inputs_of_a_group():
    layer = nn.ConvTranspose1d(4, 6, 2, groups=2)  # weight [4, 3, 2]
    weight = layer.weight.detach().clone()
    index = torch.arange(24).view(2, 2, 3, 2)  # groups, inputs, outputs, kernel
    rows = index.permute(0, 2, 1, 3).reshape(6, 4).tolist()
    prune.global_unstructured([(layer, "weight")], prune.L1Unstructured, scope="row", amount=0.5)
    assert torch.equal(layer.weight_mask.bool(), reference.prune_in_blocks(weight, rows, 2))


FORMS = {
    "pairs": (2, 1, 1),
    "fours": (4, 1, 1),
    "fives": (5, 1, 1),
    "sixteens": (16, 1, 1),
    "seventeens": (17, 1, 1),
    "rows": (300, 1, 1),
    "rows of a convolution": (12, 1, 9),
    "fours, a few interleaved": (4, 9, 1),
    "fours, many interleaved": (4, 130, 1),
    "rows, interleaved": (40, 33, 1),
    "rows of a transposed convolution": (12, 5, 4),
}
NUM_BLOCKS = 3
DATA = {
    "equal": lambda generator, size: np.zeros(size),
    "two values": lambda generator, size: generator.integers(0, 2, size),
    "few values": lambda generator, size: generator.integers(-8, 8, size),
    "distinct": lambda generator, size: generator.permutation(size) - size // 2,
}


def oracle(keys, blocks):
    """Each block sorted on its own."""
    index = np.arange(keys.size).reshape(-1, blocks.length, blocks.columns, blocks.kernel)
    lowest = np.zeros(keys.size, dtype=bool)
    for members in index.swapaxes(1, 2).reshape(-1, blocks.size):
        lowest[members[np.argsort(keys[members], kind="stable")[: blocks.num_pruned]]] = True
    return lowest


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("form", FORMS)
def test_equal_to_a_stable_sort_of_each_block(form, data, dtype):
    generator = np.random.default_rng(0)
    scratch = Scratch()
    size = FORMS[form][0] * FORMS[form][2]
    for count in sorted({0, 1, size // 2, size - 1, size}):
        blocks = Blocks(*FORMS[form], count)
        keys = DATA[data](generator, NUM_BLOCKS * blocks.band).astype(dtype)
        before = keys.copy()
        expected = oracle(keys, blocks)
        assert np.array_equal(lowest_of(blocks, keys, scratch), expected)
        assert np.array_equal(lowest_of(blocks, keys), expected)
        assert np.array_equal(keys, before)


@pytest.mark.parametrize("columns", [1, 3])
def test_short_blocks_of_more_elements_than_a_pattern_has(columns):
    blocks = Blocks(4, columns, 1, 2)
    size = 3 * (1 << 14) // blocks.band * blocks.band + blocks.band
    keys = np.random.default_rng(0).integers(0, 6, size).astype(np.int32)
    turned = keys.reshape(-1, 4, columns).swapaxes(1, 2)
    ranks = turned.argsort(axis=2, kind="stable").argsort(axis=2)
    expected = (ranks < 2).swapaxes(1, 2).reshape(-1)
    assert np.array_equal(lowest_of(blocks, keys), expected)
