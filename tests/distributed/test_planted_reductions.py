"""Wrong reductions over ranks, planted one by one: the comparison of the matrix notices each."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch.distributed as dist
from test_criteria_matrix import measured
from torch import Tensor

from distprune import criteria
from distprune._common import collectives
from distprune.criteria import gradient_moment, parts
from distprune.shards import gradients, rank_batches
from distprune.testing import run_ranks
from distprune.torch_private.managed import ParameterSource
from helpers import wrappings
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

    def summed(shard) -> Tensor:
        gradient = plain(shard).clone()
        dist.all_reduce(gradient)
        return gradient

    with mock.patch.object(parts, "local_gradient", summed):
        yield


@contextlib.contextmanager
def unweighted_counts() -> Iterator[None]:
    """Every micro-batch counts once, however many rows it has."""

    def factor_of(weight: float, loss_scale: float, power: int) -> float:
        return float(weight > 0)

    with mock.patch.object(rank_batches, "factor_of", factor_of):
        yield


@contextlib.contextmanager
def absolute_values_of_units() -> Iterator[None]:
    """|g| of every unit is added up, where the |sum of g| is meant."""
    plain = criteria.GradientMagnitude._accumulate

    def accumulate(criterion, part, gradient: Tensor, weight: float) -> None:
        plain(criterion, part, gradient.abs(), weight)

    with mock.patch.object(criteria.GradientMagnitude, "_accumulate", accumulate):
        yield


@contextlib.contextmanager
def averaged_before_squared() -> Iterator[None]:
    """E[g]^2 where E[g^2] is meant: the averaged gradient is squared."""
    plain = gradient_moment.RankBatchSums._add

    def add(sums, number: int, gradient: Tensor, factor: float) -> None:
        leaf = sums._gradients[number]
        if leaf.source.shard_group is None:
            gradient = gradient.clone()
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
            return plain(sums, number, gradient, factor)
        size, pieces = dist.get_world_size(), leaf.source.pieces(gradient)
        mean = collectives.sum_of_pieces(pieces, leaf.source.shard_group) / size
        for position, run in leaf.runs.items():
            total = sums._totals[position].view(-1)
            total.add_(mean[run].abs() ** sums._power, alpha=factor * size)

    with mock.patch.object(gradient_moment.RankBatchSums, "_add", add):
        yield


@contextlib.contextmanager
def rank_batches_of_tensor_parallel_ranks() -> Iterator[None]:
    """Squares are summed over all ranks, of which those of tensor parallelism have no replicas."""
    with mock.patch.object(gradients, "_replicas_of", lambda shard, group: (dist.group.WORLD,)):
        yield


@contextlib.contextmanager
def weights_of_this_rank_only() -> Iterator[None]:
    """The sum over all ranks is divided by the weight of the batches of one."""
    local = lambda sums, groups: sums.weight  # noqa: E731
    with mock.patch.object(gradient_moment.RankBatchSums, "_summed_weight", local):
        yield


@contextlib.contextmanager
def running_sum() -> Iterator[None]:
    """What .grad holds after each micro-batch: the sum of the gradients so far."""

    def attach(source, receive) -> None:
        source._handle = source._leaf.register_post_accumulate_grad_hook(
            lambda parameter: receive(wrappings.local(parameter.grad).clone())
        )

    with mock.patch.object(ParameterSource, "attach", attach):
        yield


@contextlib.contextmanager
def replicas_twice() -> Iterator[None]:
    """Totals are summed over the replicas again."""
    plain = collectives.Communicator.sum_floats

    def sum_floats(communicator, values: Tensor) -> None:
        plain(communicator, values)
        plain(communicator, values)

    with mock.patch.object(collectives.Communicator, "sum_floats", sum_floats):
        yield


@contextlib.contextmanager
def no_sum_over_replicas() -> Iterator[None]:
    with mock.patch.object(collectives.Communicator, "sum_floats", lambda self, values: None):
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
    (absolute_values_of_units, "GradientMagnitude", "plain-1"),
    (absolute_values_of_units, "SNIP", "fsdp2-3"),
    (averaged_before_squared, "Fisher, rank_batch", "ddp-2"),
    (averaged_before_squared, "Fisher, rank_batch", "fsdp2-3"),
    (averaged_before_squared, "Taylor, power 1, rank_batch", "fsdp1-2"),
    (rank_batches_of_tensor_parallel_ranks, "Fisher, rank_batch", "tp-2"),
    (weights_of_this_rank_only, "Fisher, rank_batch", "ddp-3"),
    (weights_of_this_rank_only, "Fisher, rank_batch", "fsdp2-3"),
    (running_sum, "Fisher, rank_batch", "ddp-2"),
    (running_sum, "Taylor, power 1, rank_batch", "tp-2"),
    (replicas_twice, "Fisher, rank_batch", "hsdp-2x2"),
    (replicas_twice, "Taylor, power 2, rank_batch", "fsdp1_hybrid-2x2"),
    (no_sum_over_replicas, "Fisher, rank_batch", "ddp-2"),
    (no_sum_over_replicas, "Fisher, rank_batch", "hsdp-2x1"),
]


def noticed(plant: str, title: str, case: Case) -> tuple[list[str], list[str]]:
    """What is wrong without the plant, and with it."""
    _, _, healthy = measured(title, case)
    with globals()[plant]():
        _, _, planted = measured(title, case)
    return healthy["wrong"], planted["wrong"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("plant", "title", "wrapping", "data"),
    [(*case, ("integer", "normal")[number % 2]) for number, case in enumerate(PLANTED)],
)
def test_a_wrong_reduction_is_noticed(plant, title, wrapping, data):
    case = Case(wrapping, data, "float32", 3, "unequal")
    size = wrappings.world_size(wrapping)
    found = run_ranks(noticed, size, plant.__name__, title, case)
    assert not any(healthy for healthy, _ in found)
    assert any("off by" in message for _, planted in found for message in planted)
