"""All criteria: how the library computes them on a rank, and what they are. One entry each.

A new criterion is a new entry of ENTRIES: the matrix of tests follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import distprune as prune
from distprune import criteria
from distprune.statistics import ActivationStatistics
from helpers import criterion_references as references
from helpers.criteria_cases import WEIGHTS, Case, Dense, Rank, loss_of

Named = dict[str, Tensor]
Scores = Mapping[Any, Any]


# Loops of a caller.


def step_by_step(rank: Rank) -> None:
    for unit in rank.units:
        rank.backward(unit)
        rank.model.zero_grad()


def own_batches(rank: Rank) -> None:
    for unit in rank.units:
        loss_of(rank.model, unit).backward()
    rank.model.zero_grad()


def forwards(rank: Rank) -> None:
    with torch.no_grad():
        for unit in rank.units:
            rank.model(unit.x)


@dataclass(frozen=True)
class Entry:
    """One criterion.

    Attributes:
        run: computes the scores on a rank, forwards and backwards included.
        expected: the scores of one process.
        baseline: the same forwards and backwards as ``run``, without the criterion.
        is_signed: whether the lowest, signed, are pruned.
        most_bytes: an upper bound on what ``run`` sends more than ``baseline``, of a rank.
        is_exact: whether scores of a case are equal bit for bit, and not to rounding only.
    """

    run: Callable[[Rank], Scores]
    expected: Callable[[Dense], Named]
    baseline: Callable[[Rank], None] = step_by_step
    is_signed: bool = False
    most_bytes: Callable[[Rank], float] = lambda rank: 300
    is_exact: Callable[[Case], bool] = lambda case: case.data == "integer"


def by_steps(make: Callable[..., Any], *, weighted: bool = False) -> Callable[[Rank], Scores]:
    """One update after each micro-batch of all ranks."""

    def run(rank: Rank) -> Scores:
        criterion = make(rank.pairs)
        for unit, count in zip(rank.units, rank.counts, strict=True):
            rank.backward(unit)
            criterion.update(weight=count) if weighted else criterion.update()
            rank.model.zero_grad()
        return criterion.scores()

    return run


def squared_product(weight: Tensor, gradient: Tensor, state: Tensor) -> Tensor:
    return state + (weight.float() * gradient.float()) ** 2


def by_rank_batches(make: Callable[..., Any]) -> Callable[[Rank], Scores]:
    """Every micro-batch of every rank is a unit, which counts as many times as it has rows.

    Gradients pile up in .grad, as in gradient accumulation.
    """

    def run(rank: Rank) -> Scores:
        criterion = make(rank.pairs)
        with criterion.calibrating():
            for unit in rank.units:
                with criterion.batch(weight=unit.weight):
                    loss_of(rank.model, unit).backward()
        return criterion.scores()

    return run


def by_inputs(kind: str) -> Callable[[Rank], Scores]:
    def run(rank: Rank) -> Scores:
        statistics = ActivationStatistics(rank.pairs)
        with statistics.collecting():
            forwards(rank)
        scores: Scores = getattr(statistics, kind)()
        return scores

    return run


# What one process computes.


def all_gradients(dense: Dense) -> tuple[list[Named], list[float]]:
    """The gradient and the number of rows of each unit of every rank."""
    gradients = [gradient for row in dense.gradients() for gradient in row]
    return gradients, [unit.weight for row in dense.units for unit in row]


def step_counts(dense: Dense) -> list[float]:
    return [sum(unit.weight for unit in row) for row in dense.units]


def inputs_of(dense: Dense) -> Named:
    """The inputs of each layer, all rows of all ranks."""
    seen: dict[str, list[Tensor]] = {name: [] for name in WEIGHTS}
    handles = [
        dense.model.get_submodule(name.split(".")[0]).register_forward_pre_hook(
            lambda _, args, name=name: seen[name].append(args[0].detach())
        )
        for name in WEIGHTS
    ]
    for row in dense.units:
        for unit in row:
            dense.model(unit.x)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(rows) for name, rows in seen.items()}


def once_per_backward(rank: Rank) -> float:
    """Arguments and results of a reduce-scatter of 4 bytes per element, and of a sum at the end."""
    return 2000 + 12 * rank.num_elements * (rank.case.num_batches + 1)


def of_inputs(kind: str, expected: Callable[[Named, Named], Named], **options: Any) -> Entry:
    return Entry(
        by_inputs(kind),
        lambda dense: expected(dense.weights, inputs_of(dense)),
        forwards,
        most_bytes=lambda rank: 2000,
        **options,
    )


def of_moment(
    unit: str, make: Callable[..., Any], expected: Callable[..., Named], **options: Any
) -> Entry:
    """Fisher or Taylor: a mean over units, weighted by their rows."""
    if unit == "global_batch":
        return Entry(
            by_steps(lambda p: make(p, unit=unit, **options), weighted=True),
            lambda dense: expected(
                dense.weights, dense.averaged(), step_counts(dense), *options.values()
            ),
        )
    return Entry(
        by_rank_batches(lambda p: make(p, unit=unit, **options)),
        lambda dense: expected(dense.weights, *all_gradients(dense), *options.values()),
        own_batches,
        most_bytes=once_per_backward,
    )


ENTRIES: dict[str, Entry] = {
    "SNIP": Entry(
        by_steps(criteria.SNIP), lambda dense: references.snip(dense.weights, dense.averaged())
    ),
    "Movement": Entry(
        by_steps(criteria.Movement),
        lambda dense: references.movement(dense.weights, dense.averaged()),
        is_signed=True,
    ),
    "GradientMagnitude": Entry(
        by_steps(criteria.GradientMagnitude),
        lambda dense: {
            name: torch.stack([g[name] for g in dense.averaged()]).sum(0).abs() for name in WEIGHTS
        },
    ),
    "Custom, sum of (w g)^2": Entry(
        by_steps(lambda p: criteria.Custom(p, squared_product, unit="global_batch")),
        lambda dense: {
            name: sum((g[name] * weight) ** 2 for g in dense.averaged())
            for name, weight in dense.weights.items()
        },
    ),
    **{
        f"{title}, {unit}": of_moment(unit, make, expected, **options)
        for unit in ("global_batch", "rank_batch")
        for title, make, expected, options in (
            ("Taylor, power 1", criteria.Taylor, references.moment, {"power": 1}),
            ("Taylor, power 2", criteria.Taylor, references.moment, {"power": 2}),
            ("Fisher", criteria.Fisher, references.fisher, {}),
        )
    },
    "Wanda": of_inputs("wanda", references.wanda),
    "STADE": of_inputs("stade", references.stade),
    "RIA": of_inputs(
        "ria",
        references.ria,
        is_exact=lambda case: False,  # its factors are quotients, rounded one by one
    ),
}


def pruning_method(entry: Entry) -> type[prune.BasePruningMethod]:
    return prune.LowestScore if entry.is_signed else prune.L1Unstructured
