"""Cases of the matrix of criteria: a model, micro-batches of every rank, and how scores compare.

A unit is one micro-batch of one data-parallel rank: inputs, factors of the outputs, and how much
it counts. The loss is a sum over rows. With data "integer" every sum is exact in every dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distprune.base.naming import unwrap
from distprune.shards.factored import FactoredScores
from helpers import wrappings
from helpers.models import Net, fill, target

WEIGHTS = ["l1.weight", "l2.weight", "l3.weight"]
# Of the largest score of a parameter. The rounding of a gradient depends on the kernels of the CPU,
# and its square has twice the relative error: up to 1.1e-6 were seen.
TOLERANCE = 2e-6


class ReluNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.l3(torch.relu(self.l2(torch.relu(self.l1(x)))))


@dataclass(frozen=True)
class Case:
    """One cell of the matrix.

    Attributes:
        wrapping: see wrappings.py.
        data: "integer" or "normal".
        dtype: of the model and its inputs.
        num_batches: micro-batches of every rank.
        counts: "equal" or "unequal" numbers of rows; unequal ones have a batch that does not count.
    """

    wrapping: str
    data: str
    dtype: str
    num_batches: int
    counts: str

    def __str__(self) -> str:
        return f"{self.data} {self.dtype}, {self.num_batches} batches, {self.counts} counts"

    @property
    def num_parts(self) -> int:
        """Data-parallel ranks. Plain models are replicas, each of which runs all there is."""
        kind, shape = wrappings.kind_of(self.wrapping), wrappings.mesh_shape(self.wrapping)
        if kind in ("plain", "tp"):
            return 1
        return shape[0] if kind == "fsdp2_tp" else wrappings.world_size(self.wrapping)


@dataclass(frozen=True)
class Unit:
    """A micro-batch of a rank.

    Attributes:
        x: inputs [rows, features].
        y: factors of the outputs [rows, outputs].
        weight: how much the unit counts: its rows, or 0.
    """

    x: Tensor
    y: Tensor
    weight: int


@torch.no_grad()
def make_model(case: Case) -> nn.Module:
    """The dense model; the same on every rank."""
    model = ReluNet(wrappings.runnable_sizes(case.wrapping))
    fill(model, "normal", case.dtype, seed=3)
    if case.data == "integer":
        generator = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
        model.l1.bias.fill_(1)  # so that few units are dead
        model.l2.bias.fill_(1)
        # Each rank of RowwiseParallel adds its share of the bias.
        model.l2.bias.mul_(wrappings.world_size(case.wrapping) // case.num_parts)
    else:
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


def make_unit(case: Case, model: nn.Module, part: int, number: int) -> Unit:
    """Micro-batch ``number`` of data-parallel rank ``part``."""
    generator = torch.Generator().manual_seed(1000 * part + number)
    num_rows = 3 if case.counts == "equal" else 2 + (2 * part + number) % 3
    sizes = (num_rows, model.l1.in_features), (num_rows, model.l3.out_features)
    if case.data == "integer":
        x, y = (torch.randint(-1, 2, size, generator=generator) for size in sizes)
        y[y == 0] = 1  # a single row may be all there is
    else:
        x, y = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    is_counted = case.counts == "equal" or (part, number) != (1, 0)
    dtype = getattr(torch, case.dtype)
    return Unit(x.to(dtype), y.to(dtype) * is_counted, num_rows * is_counted)


def loss_of(model: nn.Module, unit: Unit) -> Tensor:
    return (model(unit.x) * unit.y).sum()


class Dense:
    """What one process sees: a model, and units[number][part]."""

    def __init__(self, case: Case) -> None:
        # Integers below 257 are bfloat16 numbers, but sums of outputs are rounded in bfloat16.
        self.model = make_model(case).float()
        made = [
            [make_unit(case, self.model, part, number) for part in range(case.num_parts)]
            for number in range(case.num_batches)
        ]
        self.units = [
            [Unit(unit.x.float(), unit.y.float(), unit.weight) for unit in row] for row in made
        ]
        self.weights = {name: self.model.get_parameter(name).detach() for name in WEIGHTS}

    def gradients(self) -> list[list[dict[str, Tensor]]]:
        """[number][part] -> gradients by name, each of one unit alone."""
        parameters = [self.model.get_parameter(name) for name in WEIGHTS]
        return [
            [
                dict(
                    zip(
                        WEIGHTS,
                        torch.autograd.grad(loss_of(self.model, unit), parameters),
                        strict=True,
                    )
                )
                for unit in row
            ]
            for row in self.units
        ]

    def averaged(self) -> list[dict[str, Tensor]]:
        """[number] -> what all ranks together have in .grad: sums over the units of all parts."""
        return [
            {name: torch.stack([g[name] for g in row]).sum(0) for name in WEIGHTS}
            for row in self.gradients()
        ]


class Rank:
    """This rank's side: the wrapped model and its own units."""

    def __init__(self, case: Case) -> None:
        self.case = case
        dense = make_model(case)
        # Before the model is wrapped, which may happen in place.
        part, num_parts = wrappings.data_rank(case.wrapping)
        assert num_parts == case.num_parts
        self.units = [make_unit(case, dense, part, n) for n in range(case.num_batches)]
        self.counts = [
            sum(make_unit(case, dense, other, n).weight for other in range(num_parts))
            for n in range(case.num_batches)
        ]
        self.weights = {name: dense.get_parameter(name).detach() for name in WEIGHTS}
        self.num_elements = sum(weight.numel() for weight in self.weights.values())
        self.indices = wrappings.local_indices(dense, case.wrapping)
        self.model = wrappings.wrap(make_model(case), case.wrapping)
        inner = wrappings.unwrapped(self.model)
        placed = [target(inner, name) for name in WEIGHTS]
        self.pairs = [(unwrap(module), name) for module, name in placed]

    def backward(self, unit: Unit) -> None:
        """Leave a sum over all ranks in .grad: wrappers divide by the number of ranks."""
        (loss_of(self.model, unit) * self.case.num_parts).backward()


def whole_scores(rank: Rank, scores: Mapping[Any, Any]) -> list[Tensor]:
    """This rank's part of every score, computed if they are factored."""
    parts = []
    for name, pair in zip(WEIGHTS, rank.pairs, strict=True):
        score = scores[pair]
        if isinstance(score, FactoredScores):
            weight = rank.weights[name].float().abs()
            terms = [
                math.prod(factor.float().expand(weight.shape) for factor in term)
                for term in score.terms
            ]
            score = wrappings.my_part(weight * sum(terms), rank.indices[name])
        parts.append(wrappings.local(score))
    return parts


def compare(
    rank: Rank, parts: list[Tensor], expected: Mapping[str, Tensor], is_exact: bool
) -> list[str]:
    """What is wrong, in words.

    Args:
        is_exact: every bit has to be equal; else differences are at most TOLERANCE.
    """
    wrong = []
    for name, held in zip(WEIGHTS, parts, strict=True):
        mine = wrappings.my_part(expected[name], rank.indices[name]).to(held.dtype)
        if held.shape != mine.shape:
            wrong.append(f"{rank.case} {name}: shape {list(held.shape)}, not {list(mine.shape)}")
            continue
        scale = float(expected[name].abs().max())
        if not held.numel():
            continue
        if not scale:
            wrong.append(f"{rank.case} {name}: all expected scores are zero, which tests nothing")
            continue
        difference = float((held.double() - mine.double()).abs().max()) / scale
        if (is_exact and not torch.equal(held, mine)) or not difference <= TOLERANCE:
            wrong.append(f"{rank.case} {name}: off by {difference:.1e}: {held} not {mine}")
    return wrong


def mask_parts(rank: Rank) -> list[Tensor]:
    """This rank's part of every mask, after a pruning."""
    return [
        wrappings.local(getattr(module, name + "_mask")).double() for module, name in rank.pairs
    ]
