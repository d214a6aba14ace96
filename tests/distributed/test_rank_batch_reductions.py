"""What rank batches send, and which ranks' batches count."""

import collections
import contextlib

import pytest
import torch
import torch.distributed as dist

from distprune.criteria import Fisher, Taylor
from distprune.statistics import GradientStatistics
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on
from helpers.micro_batches import (
    ReplicasOfTensorParallelism,
    Units,
    Wrapped,
    num_tokens,
    wrong_totals,
)
from helpers.wrappings import local

# Of 8 bytes each, in every calibration: an agreement when it begins and two when it ends, and the
# sums of batches and weights over the ranks.
AGREEMENTS = [("allreduce", 40), ("allreduce", 40), ("allreduce", 40), ("allreduce", 24)]
WEIGHT = [("allreduce", 16)]  # the sum of one weight
SAME_ORDER = [("allreduce", 16)]


def run_batches(wrapped: Wrapped, batch=contextlib.nullcontext) -> None:
    for number in range(2):
        with batch():
            wrapped.loss(number).backward()


def extra_traffic(wrapping: str) -> tuple[collections.Counter, collections.Counter]:
    """(what a calibration of two micro-batches sends, what it has to send), without FSDP's own."""
    wrapped = Wrapped(wrapping, "float32")
    model = wrapped.model
    run_batches(wrapped)  # what is sent at the first step only
    criterion = Fisher(wrapped.pairs, unit="rank_batch")
    with Traffic() as without:
        run_batches(wrapped)
    with Traffic() as both, criterion.calibrating():
        run_batches(wrapped, criterion.batch)
    sent = collections.Counter(map(plain_name, both.calls))
    sent -= collections.Counter(map(plain_name, without.calls))
    kind, size = wrappings.kind_of(wrapping), wrappings.world_size(wrapping)
    expected = [*AGREEMENTS]
    shapes = [parameter.shape for parameter in wrapped.dense.parameters()]
    if kind in ("plain", "ddp"):
        expected += [*WEIGHT, *(("allreduce", 4 * shape.numel()) for shape in shapes)]
    if kind in ("fsdp2", "hsdp"):
        size = wrappings.mesh_shape(wrapping)[-1]
        rows = [-(-shape[0] // size) for shape in shapes]
        pieces = [4 * n * shape[1:].numel() for n, shape in zip(rows, shapes, strict=True)]
        if size > 1:
            expected += [*SAME_ORDER, *[("reduce_scatter", (size + 1) * n) for n in pieces] * 2]
        expected += WEIGHT * (2 if kind == "hsdp" else 1)  # over each axis of the mesh
    if kind == "hsdp":
        expected += [("allreduce", 4 * local(p).numel()) for p in model.parameters()]
    if kind == "fsdp1":
        handles = {m._handle for m in type(model).fsdp_modules(model) if m._handle is not None}
        sizes = [4 * handle.flat_param._sharded_size.numel() for handle in handles]
        expected += [*SAME_ORDER, *WEIGHT]
        expected += [("reduce_scatter", (size + 1) * n) for n in sizes] * 2
    return sent, collections.Counter(expected)


def plain_name(call: tuple[str, int]) -> tuple[str, int]:
    """torch 2.11 and 2.13 call the same operation by different names."""
    name, num_bytes = call
    return ("reduce_scatter" if "reduce_scatter" in name else name.strip("_")), num_bytes


@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-3", "fsdp1-3", "fsdp2-3", "hsdp-2x2", "tp-2"])
def test_what_is_sent(wrapping):
    """Under TP also the plain layer, whose replicas are summed as those of plain modules."""
    for sent, expected in run_ranks(extra_traffic, wrappings.world_size(wrapping), wrapping):
        if wrapping.startswith("tp"):
            expected += collections.Counter([*WEIGHT, ("allreduce", 4 * 15), ("allreduce", 4 * 3)])
        assert sent == expected


def two_calibrations(wrapping: str) -> list[str]:
    """Twice the same three batches: the scores of the first time; and replicas with equal bits."""
    wrapped = Wrapped(wrapping, "integer float32")
    criterion = Fisher(wrapped.pairs, unit="rank_batch")
    for _ in range(2):
        wrapped.calibrate(criterion)
    wrong = wrapped.wrong(criterion, wrapped.units())
    if criterion.num_updates != 2 * 3 * dist.get_world_size():
        wrong.append(f"{criterion.num_updates} updates")
    return wrong


@pytest.mark.parametrize(
    "wrapping", ["plain-1", "ddp-3", "fsdp1_hybrid-2x2", "fsdp2-2", "fsdp2_dim1-2", "hsdp-2x2"]
)
def test_a_second_calibration_adds_to_the_first(wrapping):
    assert_nothing_wrong_on(wrapping, two_calibrations)


def bits_of_replicas(wrapping: str) -> list[list]:
    wrapped = Wrapped(wrapping, "float32")
    criterion = Fisher(wrapped.pairs, unit="rank_batch")
    wrapped.calibrate(criterion)
    return [local(score).tolist() for score in criterion.scores().values()]


@pytest.mark.parametrize("wrapping", ["plain-3", "ddp-4", "hsdp-2x2", "fsdp1_hybrid-2x2"])
def test_replicas_have_the_same_bits(wrapping):
    ranks = run_ranks(bits_of_replicas, wrappings.world_size(wrapping), wrapping)
    num_shards = 1 if wrapping[:3] in ("pla", "ddp") else 2
    for number, scores in enumerate(ranks):
        assert scores == ranks[number % num_shards]


def made(kind: str, wrapped: Wrapped, **options) -> Fisher | GradientStatistics:
    if kind == "sums":
        return GradientStatistics(iter(wrapped.matrices), **options)
    return Fisher(wrapped.pairs, unit="rank_batch", **options)


def wrong_of(wrapped: Wrapped, found: Fisher | GradientStatistics, units: Units) -> list[str]:
    if isinstance(found, GradientStatistics):
        return wrong_totals(found, units)
    return wrapped.wrong(found, units)


def uneven_participation(wrapping: str, kind: str) -> list[str]:
    """Rank r has r micro-batches. Where a backward needs all ranks, the others weigh nothing."""
    wrapped = Wrapped(wrapping, "integer float32")
    calibrated = made(kind, wrapped)
    rank, size = dist.get_rank(), dist.get_world_size()
    is_quiet = kind == "sums" and wrapping.startswith("ddp")
    is_alone = is_quiet or wrappings.kind_of(wrapping) == "plain"
    quiet = wrapped.model.no_sync() if is_quiet else contextlib.nullcontext()
    with calibrated.calibrating(), quiet:
        for number in range(rank if is_alone else size - 1):
            has_data = number < rank
            with calibrated.batch(weight=num_tokens(rank, number) if has_data else 0):
                # Whatever a rank without data runs.
                (wrapped.loss(number) * (1 if has_data else torch.inf)).backward()
    units = wrapped.units(size - 1)
    units = [units[r * (size - 1) + a] for r in range(size) for a in range(r)]
    return wrong_of(wrapped, calibrated, units)


@pytest.mark.parametrize("kind", ["scores", "sums"])
@pytest.mark.parametrize("wrapping", ["plain-3", "ddp-3", "fsdp1-3", "fsdp2-3"])
def test_ranks_with_fewer_batches(wrapping, kind):
    assert_nothing_wrong_on(wrapping, uneven_participation, kind)


def data_parallel_over_tensor_parallel(kind: str) -> list[str]:
    """The ranks of group= have other batches."""
    wrapped, wrong = ReplicasOfTensorParallelism(), []
    try:
        with made(kind, wrapped).calibrating():
            wrong.append("a parameter whose data-parallel ranks are not known was accepted")
    except ValueError as error:
        if "expected group=" not in str(error):
            wrong.append(str(error))
    calibrated = made(kind, wrapped, group=wrapped.group)
    wrapped.calibrate(calibrated)
    return wrong + wrong_of(wrapped, calibrated, wrapped.units())


@pytest.mark.parametrize("kind", ["scores", "sums"])
def test_data_parallel_replicas_of_a_tensor_parallel_model(kind):
    assert_nothing_wrong(run_ranks(data_parallel_over_tensor_parallel, 4, kind))


def two_criteria(wrapping: str) -> list[str]:
    """Two calibrations at once, of which the first ends first."""
    wrapped, wrong = Wrapped(wrapping, "integer float32"), []
    first = Fisher(wrapped.pairs, unit="rank_batch")
    second = Taylor(wrapped.pairs, unit="rank_batch", power=1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(second.calibrating())
        with first.calibrating():
            for number in range(2):
                with first.batch(1.0), second.batch(1.0):
                    wrapped.loss(number).backward()
        with second.batch():
            wrapped.loss(2).backward()
    for criterion, count, power, factor in ((first, 2, 2, 0.5), (second, 3, 1, 1.0)):
        units = [(1.0, gradients) for _, gradients in wrapped.units(count)]
        wrong += wrapped.wrong(criterion, units, power, factor)
    return wrong


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp1-2", "fsdp2-2", "hsdp-2x2"])
def test_two_criteria_at_once(wrapping):
    assert_nothing_wrong_on(wrapping, two_criteria)
