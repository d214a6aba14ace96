"""Gradient statistics of every kind of parameter, and the factors that are made of them."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import distprune as prune
from distprune.statistics import GradientStatistics
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong
from helpers.models import target


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
        found = as_matrices(factor, pair.fqn)
        if not torch.allclose(found.double(), fitted.sqrt(), rtol=1e-6, atol=0):
            wrong.append(f"{pair.fqn}: the factor {found}, not {fitted.sqrt()}")
    return wrong


@pytest.mark.filterwarnings("ignore:all gradients are zero of")
@pytest.mark.parametrize("wrapping", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_every_kind_of_parameter(wrapping):
    assert_nothing_wrong(run_ranks(wrong_kinds, 2, wrapping))
