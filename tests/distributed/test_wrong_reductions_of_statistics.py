"""Reductions that are wrong, planted: each of them is seen by the tests of statistics."""

import contextlib
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_activation_statistics_on_wrappers import differences
from torch import nn
from torch.utils.checkpoint import checkpoint

import distprune as prune
from distprune.statistics import ActivationStatistics, activation, collecting, input_parts
from distprune.testing import run_ranks


def sum_over_tensor_parallel_ranks():
    """Every rank counts, as if all had other tokens."""
    alone = (dist.get_rank(),)
    return [mock.patch.object(activation, "_ranks_of", lambda part, peers: (alone, alone))]


def local_columns_at_the_beginning():
    """Columns of a rowwise layer are added, and not put in their place."""
    right = activation._packed

    def at_zero(parameter, peers, rank):
        seen = {
            replace(part, features=range(len(part.features))): sums
            for part, sums in parameter.seen.items()
        }
        return right(replace(parameter, seen=seen), peers, rank)

    return [mock.patch.object(activation, "_packed", at_zero)]


def mean_of_means():
    """Each rank divides by its own number of tokens, and the means are averaged."""
    right = activation._packed

    def averaged(parameter, peers, rank):
        row, head = right(parameter, peers, rank).clone(), len(parameter.calls)
        row[head + 3 :] /= row[head].clamp(min=1)
        row[head] = 1
        return row

    return [mock.patch.object(activation, "_packed", averaged)]


def replicas_averaged():
    """Sums over the shards of HSDP only, as if replicas had the same data."""
    right = activation._packed

    def of_first_replica(parameter, peers, rank):
        return right(parameter, peers, rank) * (rank < 2)

    return [mock.patch.object(activation, "_packed", of_first_replica)]


def padding_counted():
    everything = mock.patch.object(
        input_parts, "_keep_of", lambda label, shape, mask: torch.ones_like(mask)
    )
    return [everything]


def squares_in_the_dtype_of_the_input():
    def rounded(rows, keep=None, num_kept=None):
        rows = rows if keep is None else rows[keep]
        both = torch.stack([rows.sum(0), rows.square().sum(0)]).double()
        return input_parts.Sums(rows.shape[0], both)

    return [mock.patch.object(collecting, "sums_of_rows", rounded)]


@contextlib.contextmanager
def planted(fault):
    """What a function returns is in force: patches."""
    with contextlib.ExitStack() as stack:
        for patch in fault():
            stack.enter_context(patch)
        yield


def wrong_with(fault, *case):
    with planted(fault):
        try:
            return differences(*case)
        except ValueError as error:  # refused, which is as good
            return [str(error)]


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "size", "case"),
    [
        (sum_over_tensor_parallel_ranks, 2, ("tp-2", 1, False, F32)),
        (sum_over_tensor_parallel_ranks, 4, ("fsdp2_tp-2x2", 1, False, F32)),
        (local_columns_at_the_beginning, 2, ("tp-2", 1, False, F32)),
        (mean_of_means, 3, ("fsdp2-3", 1, False, F32)),
        (replicas_averaged, 4, ("hsdp-2x2", 1, False, F32)),
        (padding_counted, 2, ("fsdp1-2", 3, True, F32)),
        (padding_counted, 2, ("plain-2", 3, True, F32)),
        (squares_in_the_dtype_of_the_input, 3, ("fsdp2-3", 3, False, BF16)),
    ],
)
def test_a_wrong_reduction_is_seen(fault, size, case):
    for wrong in run_ranks(wrong_with, size, fault, *case):
        assert wrong


def test_forwards_that_run_twice_would_count_twice():
    """Without the check, activation checkpointing would double the sums."""
    layer = nn.Linear(3, 2)
    statistics = ActivationStatistics([prune.NamedParameter(layer, "weight", "layer.weight")])
    is_enabled = torch.is_grad_enabled

    def looked_at() -> bool:
        return is_enabled() and sys._getframe(1).f_code.co_name != "_checked_input"

    with statistics.collecting(), mock.patch.object(torch, "is_grad_enabled", looked_at):
        x = torch.ones(2, 3, requires_grad=True)
        with torch.enable_grad():
            checkpoint(layer, x, use_reentrant=True).sum().backward()
    assert statistics.num_tokens() == {"layer.weight": 4}
