"""Wrong reductions over ranks, planted one by one: the comparison of the matrix notices each."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist
from test_criteria_matrix import measured
from torch import Tensor

from distprune import criteria
from distprune._common import collectives
from distprune.criteria import base, rank_batch
from distprune.shards import gradients
from distprune.testing import run_ranks
from helpers import criteria_table, wrappings
from helpers.criteria_cases import Case, Rank


@contextlib.contextmanager
def mean_of_absolute_values() -> Iterator[None]:
    """|g| of every rank is averaged, where |mean of g| is meant."""
    plain = Rank.backward

    def backward(rank: Rank, unit) -> None:
        with rank.model.no_sync():
            plain(rank, unit)
        for parameter in rank.model.parameters():
            parameter.grad.abs_()
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())

    with mock.patch.object(Rank, "backward", backward):
        yield


@contextlib.contextmanager
def hook_before_the_wrapper() -> Iterator[None]:
    """What a hook of the parameter sees: its gradient before the wrapper has averaged it."""
    plain = Rank.backward

    def backward(rank: Rank, unit) -> None:
        seen: dict[Tensor, Tensor] = {}
        handles = [
            parameter.register_post_accumulate_grad_hook(
                lambda p: seen.__setitem__(p, p.grad.clone())
            )
            for parameter in rank.model.parameters()
        ]
        plain(rank, unit)
        for handle in handles:
            handle.remove()
        for parameter, gradient in seen.items():
            parameter.grad = gradient

    with mock.patch.object(Rank, "backward", backward):
        yield


@contextlib.contextmanager
def sum_over_tensor_parallel_ranks() -> Iterator[None]:
    """A reduction over all ranks, of which those of tensor parallelism have other elements."""
    plain = gradients.local_gradient

    def summed(shard, managed) -> Tensor:
        gradient = plain(shard, managed).clone()
        dist.all_reduce(gradient)
        return gradient

    with mock.patch.object(base, "local_gradient", summed):
        yield


@contextlib.contextmanager
def unweighted_counts() -> Iterator[None]:
    """Every micro-batch counts once, however many rows it has."""

    def factor(batch: rank_batch.Batch, power: int) -> float:
        return float(batch.weight > 0)

    with mock.patch.object(rank_batch.Batch, "factor", factor):
        yield


@contextlib.contextmanager
def averaged_before_squared() -> Iterator[None]:
    """E[g]^2 where E[g^2] is meant: the averaged gradient is squared."""
    entry = criteria_table.ENTRIES["Fisher, rank_batch"]
    wrong = criteria_table.by_steps(
        lambda p: criteria.Fisher(p, unit="global_batch"), weighted=True
    )
    changed = {"Fisher, rank_batch": replace(entry, run=wrong)}
    with mock.patch.dict(criteria_table.ENTRIES, changed):
        yield


@contextlib.contextmanager
def no_sum_over_ranks() -> Iterator[None]:
    """Every rank uses the inputs that it has seen itself."""
    plain = collectives.Communicator.reduce_floats

    def local(communicator, size: int, step) -> Tensor:
        plain(communicator, size, step)
        return step()

    with mock.patch.object(collectives.Communicator, "reduce_floats", local):
        yield


PLANTED = [
    (no_sum_over_ranks, "Wanda", "ddp-2"),
    (no_sum_over_ranks, "STADE", "fsdp2-3"),
    (no_sum_over_ranks, "RIA", "hsdp-2x2"),
    (mean_of_absolute_values, "SNIP", "ddp-2"),
    (mean_of_absolute_values, "Taylor, power 1, global_batch", "ddp-3"),
    (hook_before_the_wrapper, "SNIP", "ddp-2"),
    (hook_before_the_wrapper, "Fisher, global_batch", "ddp-3"),
    (sum_over_tensor_parallel_ranks, "SNIP", "tp-2"),
    (sum_over_tensor_parallel_ranks, "Taylor, power 2, global_batch", "tp-3"),
    (unweighted_counts, "Fisher, rank_batch", "ddp-2"),
    (unweighted_counts, "Taylor, power 2, rank_batch", "fsdp2-3"),
    (unweighted_counts, "Taylor, power 1, rank_batch", "fsdp1-2"),
    (averaged_before_squared, "Fisher, rank_batch", "ddp-2"),
    (averaged_before_squared, "Fisher, rank_batch", "fsdp2-3"),
]


def noticed(plant: str, title: str, case: Case) -> tuple[list[str], list[str]]:
    """What is wrong without the plant, and with it."""
    _, _, healthy = measured(title, case)
    with globals()[plant]():
        _, _, planted = measured(title, case)
    return healthy["wrong"], planted["wrong"]


@pytest.mark.parametrize("data", ["integer", "normal"])
@pytest.mark.parametrize(("plant", "title", "wrapping"), PLANTED)
def test_a_wrong_reduction_is_noticed(plant, title, wrapping, data):
    case = Case(wrapping, data, "float32", 3, "unequal")
    size = wrappings.world_size(wrapping)
    found = run_ranks(noticed, size, plant.__name__, title, case)
    assert not any(healthy for healthy, _ in found)
    assert any("off by" in message for _, planted in found for message in planted)
