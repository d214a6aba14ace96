"""Gram matrices on every wrapper: exactly those of one process that runs all batches."""

from unittest import mock

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
from test_wrong_reductions_of_statistics import planted
from torch import Tensor, nn

import distprune as prune
from distprune.statistics import GramMatrices, gram
from distprune.testing import run_ranks
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
    rows = [block.rows.shape[1] for _, block in grams.blocks()]
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


def every_tensor_parallel_rank():
    """Every rank adds its products, as if all had other tokens."""
    adds = mock.patch.object(gram.GramCollector, "_adds", lambda self, part: True)
    peers = mock.patch.object(gram, "peers_of", lambda same, rank: (rank,))
    return [adds, peers]


def block_of_the_next_rank():
    """Each rank keeps the rows that belong to another one."""
    right = gram.Communicator.scatter_sum

    def wrong(self, pieces):
        return right(self, pieces.roll(1, 0))

    return [mock.patch.object(gram.Communicator, "scatter_sum", wrong)]


def one_rank_only():
    """Sums of this rank, as if every rank had run all batches."""
    return [
        mock.patch.object(
            gram.Communicator, "scatter_sum", lambda self, pieces: pieces[self.index].clone()
        )
    ]


def wrong_with(fault, *case):
    with planted(fault):
        try:
            return differences(*case)
        except (ValueError, RuntimeError) as error:  # refused, which is as good
            return [str(error)]


@pytest.mark.parametrize(
    ("fault", "size", "case"),
    [
        (every_tensor_parallel_rank, 2, ("tp-2", 1, False, torch.float32)),
        (block_of_the_next_rank, 3, ("fsdp2-3", 1, False, torch.float32)),
        (one_rank_only, 2, ("ddp-2", 1, False, torch.float32)),
    ],
)
def test_a_wrong_reduction_is_seen(fault, size, case):
    for wrong in run_ranks(wrong_with, size, fault, *case):
        assert wrong
