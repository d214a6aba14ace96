"""Gradient statistics on every wrapper and of every kind of parameter: those of one process."""

import contextlib
import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import distprune as prune
from distprune.statistics import GradientStatistics
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong, raised
from helpers.micro_batches import WEIGHTS, Wrapped, make_model, wrong_totals
from helpers.models import target
from helpers.sampling import every

ALL = wrappings.sampled([*wrappings.TRAINED, *wrappings.FSDP2_DIM1])


def differences(wrapping: str, data: str, num_batches: int) -> list[str]:
    """Twice the same batches, in two calibrations, of which each has other tokens on each rank."""
    wrapped = Wrapped(wrapping, data)
    statistics = GradientStatistics(wrapped.matrices)
    for _ in range(2):
        wrapped.calibrate(statistics, num_batches)
    is_exact = data.startswith("integer")
    wrong = wrong_totals(statistics, 2 * wrapped.units(num_batches), is_exact)
    for held in statistics.totals().values():
        own = torch.cat([held.by_output, held.by_input])
        of_all = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(of_all, own)
        if not all(torch.equal(own, other) for other in of_all):
            wrong.append("ranks have different bits")
    return wrong


CASES = [(d, n) for d in ("integer float32", "integer bfloat16", "float32") for n in (3, 1)]


@pytest.mark.parametrize(
    ("wrapping", "case"),
    [(w, case) for i, w in enumerate(ALL) for case in every(4, CASES, start=i)],
)
def test_the_sums_are_those_of_one_process(wrapping, case):
    assert_nothing_wrong(run_ranks(differences, wrappings.world_size(wrapping), wrapping, *case))


def traffic(wrapping: str) -> tuple[dict[str, int], int]:
    """Bytes that are sent besides the training's own, and the number of outputs and inputs."""
    wrapped = Wrapped(wrapping, "integer float32")
    statistics = GradientStatistics(wrapped.matrices)

    def run(batch=contextlib.nullcontext) -> None:
        for number in range(2):
            with batch():
                wrapped.loss(number).backward()

    run()  # what is sent at the first step only
    with Traffic() as without:
        run()
    with Traffic() as both, statistics.calibrating(), Traffic() as inside:
        run(statistics.batch)
    with Traffic() as asked:
        statistics.fisher()
    sent = {
        "inside": inside.num_bytes - without.num_bytes,
        "outside": both.num_bytes - inside.num_bytes,
        "asked": asked.num_bytes,
    }
    shapes = [wrapped.dense.get_parameter(name).shape for name in WEIGHTS]
    return sent, sum(sum(shape) for shape in shapes)


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp1-2", "fsdp2-2", "tp-2"])
def test_what_is_sent(wrapping):
    for sent, num_sums in run_ranks(traffic, 2, wrapping):
        assert sent["inside"] == 0
        # Agreements when it begins and when it ends, and the sums.
        assert 0 <= sent["outside"] - 3 * 40 - 8 * (num_sums + 3 * 3 + 1) <= 3 * 8 * 10
        assert sent["asked"] == 40 + 8 * 2 * 3  # an agreement, and two words per parameter


def errors_of(wrapping: str) -> list[str]:
    """What goes wrong on one rank alone is raised on all of them, and changes nothing."""
    wrapped = Wrapped(wrapping, "integer float32")
    pairs = wrapped.matrices
    statistics = GradientStatistics(pairs)
    wrapped.calibrate(statistics)
    is_first = dist.get_rank() == 0
    found = []

    def note(attempt) -> None:
        found.append(raised(attempt))

    def run(weight=1.0, times=1, scale=1.0) -> None:
        with statistics.calibrating(), statistics.batch(weight):
            for _ in range(times):
                (wrapped.loss(0) * scale).backward()

    note(lambda: run(times=2))
    note(lambda: run(scale=torch.inf if is_first else 1.0))
    if wrappings.kind_of(wrapping) in ("tp", "fsdp2_tp"):
        note(lambda: run(weight=1.0 + is_first))
    else:
        note(lambda: run(times=int(not is_first)) if wrapping.startswith("plain") else run(times=0))
    note(lambda: statistics.fisher([(wrapped.model, "weight")] if is_first else None))
    note(lambda: GradientStatistics(pairs[: 2 + is_first]))
    note(GradientStatistics(pairs).fisher)
    return found + wrong_totals(statistics, wrapped.units())  # those of the first calibration


@pytest.mark.parametrize("wrapping", ["plain-2", "fsdp1-2", "fsdp2-2", "tp-2"])
def test_an_error_of_one_rank_is_raised_on_all_and_changes_nothing(wrapping):
    messages = [
        r"RuntimeError: .*l\d.weight got 2 gradients in one batch",
        r"ValueError: .*l\d.weight: the sum of its squared gradients is not finite",
        r"ValueError: .*different weights"
        if wrapping == "tp-2"
        else r"RuntimeError: .*a batch had no gradient of any parameter",
        r"ValueError: .*is none of the parameters of these statistics",
        r"ValueError: .*number of parameters",
        r"ValueError: .*l1.weight: the weights of all its batches are 0, or there was none",
    ]
    for found in run_ranks(errors_of, 2, wrapping):
        assert len(found) == len(messages), found
        for text, message in zip(found, messages, strict=True):
            assert re.match(message, text), text


def refusal_under(wrapping: str) -> str:
    wrapped = Wrapped(wrapping, "integer float32")
    pairs = wrapped.matrices
    statistics = GradientStatistics(pairs)
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.5)
    return raised(lambda: wrapped.calibrate(statistics))


@pytest.mark.parametrize("wrapping", ["fsdp1-2", "fsdp2-2"])
def test_pruned_parameters_under_fsdp_are_refused(wrapping):
    for text in run_ranks(refusal_under, 2, wrapping):
        assert text.startswith("NotImplementedError: l1.weight is pruned and sharded"), text


def scores_after_saving(wrapping: str, path: str) -> list[str]:
    """A file of any sharding gives the same statistics on one process."""
    wrapped = Wrapped(wrapping, "integer float32")
    statistics = GradientStatistics(wrapped.matrices)
    wrapped.calibrate(statistics)
    statistics.save(path)
    loaded = GradientStatistics.load(path, wrapped.matrices)
    single = make_model(wrapping, "integer float32")
    alone = [prune.NamedParameter(*target(single, name), name) for name in WEIGHTS]
    on_one = GradientStatistics.load(path, alone, group=dist.new_subgroups(1)[0])
    wrong = []
    for other in (loaded, on_one):
        for mine, its in zip(statistics.fisher().values(), other.fisher().values(), strict=True):
            if mine.checksum() != its.checksum():
                wrong.append(f"{mine} is not {its}")
    wrapped.calibrate(loaded)  # goes on
    return wrong + wrong_totals(loaded, 2 * wrapped.units())


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp2-3", "fsdp2_tp-2x2"])
def test_statistics_are_saved_and_loaded_on_any_sharding(wrapping, tmp_path):
    path = str(tmp_path / "statistics.safetensors")
    size = wrappings.world_size(wrapping)
    assert_nothing_wrong(run_ranks(scores_after_saving, size, wrapping, path))


class Kinds(nn.Module):
    """Tied embedding and head, convolutions, fused experts both ways, and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.conv = nn.Conv2d(4, 6, (2, 1), bias=False)
        self.grouped = nn.Conv1d(4, 6, 2, groups=2, bias=False)
        self.experts = Experts((3, 4, 2), is_transposed=False)
        self.transposed = Experts((3, 4, 2), is_transposed=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)  # [batch, tokens, 4]
        columns = x.transpose(1, 2)
        images = self.conv(columns.unsqueeze(-1)).sum()
        waves = self.grouped(columns).sum()
        rows = x.flatten(0, 1)
        some = self.experts(rows[:, :2], 0) + self.experts(rows[:, :2], 2).flip(0)
        others = self.transposed(rows, 1).sum()
        return self.head(x)[..., 0].sum() + images + waves + (some * rows).sum() + others


class Experts(nn.Module):
    def __init__(self, shape: tuple[int, ...], is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, rows: Tensor, expert: int) -> Tensor:
        weight = self.weight[expert]
        return rows @ (weight if self.is_transposed else weight.T)


def integer_kinds() -> Kinds:
    model, generator = Kinds(), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    return model


def as_matrices(squares: Tensor, name: str) -> Tensor:
    """[matrices, outputs, inputs], written out for each kind of parameter."""
    if name == "conv.weight":
        return squares.reshape(1, 6, 8)
    if name == "grouped.weight":
        return squares.reshape(2, 3, 4)
    if name == "experts.weight":
        return squares
    if name == "transposed.weight":
        return squares.transpose(1, 2)
    return squares.unsqueeze(0)


def wrong_kinds(wrapping: str) -> list[str]:
    single, model = integer_kinds(), integer_kinds()
    rank, size = dist.get_rank(), dist.get_world_size()
    if wrapping == "fsdp2":
        for layer in (model.conv, model.grouped, model.experts, model.transposed):
            fully_shard(layer)
        fully_shard(model)
    if wrapping == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    if wrapping == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    batches = [torch.arange(3 * r, 3 * r + 6).view(2, 3) % 5 for r in range(size)]
    named = dict(single.named_parameters())
    inner = wrappings.unwrapped(model)
    pairs = [prune.NamedParameter(*target(inner, name), name) for name in named]
    statistics = GradientStatistics(pairs)
    with statistics.calibrating(), statistics.batch(weight=rank + 1):
        model(batches[rank]).backward()
    squares = {name: torch.zeros_like(p).double() for name, p in named.items()}
    for r, batch in enumerate(batches):
        found = torch.autograd.grad(single(batch), list(named.values()))
        for name, gradient in zip(named, found, strict=True):
            squares[name] += (r + 1) * gradient.double() ** 2
    wrong = []
    total = sum(r + 1 for r in range(size))
    scores = statistics.fisher()
    for pair, held in statistics.totals().items():
        matrices = as_matrices(squares[pair.fqn], pair.fqn)
        if not torch.equal(held.by_output, matrices.sum(2).flatten()):
            wrong.append(f"{pair.fqn}: {held.by_output}, not {matrices.sum(2)}")
        if not torch.equal(held.by_input.flatten(), matrices.sum(1).flatten()):
            wrong.append(f"{pair.fqn}: {held.by_input}, not {matrices.sum(1)}")
        mean = matrices / total
        rows, columns = mean.sum(2, keepdim=True), mean.sum(1, keepdim=True)
        fitted = rows * columns / mean.sum((1, 2), keepdim=True).clamp(min=1e-300)
        factor = torch.ones(named[pair.fqn].shape)
        for each in scores[pair].terms[0]:
            factor = factor * each
        found = as_matrices(factor, pair.fqn).double()
        is_seen = matrices.sum((1, 2), keepdim=True) > 0  # else others of the layer speak for it
        found = torch.where(is_seen, found, 0)
        if not torch.allclose(found, fitted.sqrt(), rtol=1e-6, atol=0):
            wrong.append(f"{pair.fqn}: the factor {found}, not {fitted.sqrt()}")
    return wrong


@pytest.mark.parametrize("wrapping", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_every_kind_of_parameter(wrapping):
    assert_nothing_wrong(run_ranks(wrong_kinds, 2, wrapping))
