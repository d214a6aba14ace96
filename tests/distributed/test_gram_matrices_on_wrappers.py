"""Gram matrices on every wrapper: exactly those of one process that runs all batches."""

import pytest
import torch
import torch.distributed as dist
from test_activation_statistics_on_wrappers import (
    ALL,
    batches_of,
    collect,
    of_normal_data,
    parts_of,
)
from torch import Tensor, nn

import distprune as prune
from distprune.statistics import GramMatrices
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong_on
from helpers.integer_nets import integer_net
from helpers.least_squares import gram_of


def expected(net: nn.Module, parts: list[list], is_masked: bool) -> dict[str, Tensor]:
    """The Gram matrix of each layer, from the batches of all parts."""
    rows = torch.cat(
        [x[mask] if is_masked else x.flatten(0, 1) for batches in parts for x, mask in batches]
    )
    result = {}
    with torch.no_grad():
        inputs = rows.double()
        for name in ("l1", "l2", "l3"):
            result[f"{name}.weight"] = gram_of(inputs)
            layer = net.get_submodule(name).double()
            inputs = torch.relu(inputs @ layer.weight.T + layer.bias)
    return result


def differences(wrapping: str, num_batches: int, is_masked: bool, dtype: torch.dtype) -> list[str]:
    sizes = wrappings.runnable_sizes(wrapping)
    model = wrappings.wrap(integer_net(sizes, dtype), wrapping)
    part, num_parts = parts_of(wrapping)
    grams = GramMatrices(prune.select(model))
    has_empty = wrappings.kind_of(wrapping) not in ("tp", "fsdp2_tp")
    parts = [batches_of(n, num_batches, sizes[0], dtype, has_empty) for n in range(num_parts)]
    collect(model, grams, parts[part], is_masked)
    reference = expected(integer_net(sizes, dtype), parts, is_masked)
    wrong = []
    for pair in prune.select(model):
        found, right = grams.matrix(*pair), reference[pair.fqn]
        if not torch.equal(found.double(), right):
            wrong.append(f"{pair.fqn}: {found.tolist()}, not {right.tolist()}")
        squares = grams.totals([pair])[pair].squares
        if not torch.equal(squares, right.diagonal()):
            wrong.append(f"{pair.fqn}: squares {squares.tolist()}, not the diagonal")
    rows = [block.rows[0].shape[0] for _, block in grams.blocks()]
    if max(rows) > -(-max(sizes[:3]) // dist.get_world_size()):
        wrong.append(f"this rank holds {rows} rows")
    return wrong


CASES = [(1, False, torch.float32), (3, True, torch.float32), (3, False, torch.bfloat16)]


@pytest.mark.parametrize(
    ("wrapping", "case"), [(w, CASES[i % len(CASES)]) for i, w in enumerate(ALL)]
)
def test_the_matrices_are_those_of_one_process(wrapping, case):
    assert_nothing_wrong_on(wrapping, differences, *case)


def wrong_with_normal_data(wrapping: str) -> list[str]:
    grams, pairs, reference, others = of_normal_data(GramMatrices, wrapping, 500)
    wrong = []
    for pair, own in zip(pairs, others, strict=True):
        found, right = grams.matrix(*pair), reference.matrix(*own)
        if (found - right).abs().max() > 1e-6 * right.abs().max():
            wrong.append(f"{pair.fqn}: {(found - right).abs().max()}")
        factors = [g.obs([p])[p].terms[0][0] for g, p in ((grams, pair), (reference, own))]
        if not torch.allclose(*factors, rtol=1e-4):
            wrong.append(f"{pair.fqn}: factors {factors}")
    return wrong


@pytest.mark.parametrize("wrapping", ["fsdp1-3", "fsdp2-3", "tp-2", "fsdp2_tp-2x2"])
def test_rounded_sums_and_obs_agree(wrapping):
    assert_nothing_wrong_on(wrapping, wrong_with_normal_data)
