"""What the magnitudes of each tensor are divided by, in groups that are normalised.

The rule is that of ``_common.exact_sums``: the largest magnitude of a tensor decides on a grid, and
the sum is taken on it. All numbers are integers when they are added, so the result does not depend
on how the elements are cut into pieces and spread over ranks.

[Note: runs] The largest magnitude is known at the end of a read. So sums are taken on the grid of
the largest one so far, and what was added on another grid than the final one is read again: the
elements before the largest power of two, which for most tensors are few::

    pieces of a tensor      |piece|piece|piece|piece|piece|piece|
    largest so far           0.4   0.4   0.6   0.6   0.6   0.7      0.5 <= 0.6, 0.7 < 1: one grid
    runs                    | again     | sum, on the final grid|
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distprune._common.exact_sums import (
    check_divisor,
    exponent_of,
    from_words,
    grid_sum,
    grid_sum_of_counts,
    largest_of,
    power_of,
    statistic,
    to_words,
)
from distprune._common.memory import Scratch
from distprune.files.errors import CheckpointError
from distprune.files.planning import Plan
from distprune.files.ranking.keys import Array
from distprune.files.ranking.scales import magnitudes
from distprune.files.ranking.streaming import nan_error
from distprune.files.ranking.tallies import Tallies, Weights
from distprune.files.ranking.units import PruneUnit, Span, units_by_rank
from distprune.files.team import Team


@dataclass(frozen=True)
class Measured:
    """What was found in the groups that are normalised, the same on every rank.

    Attributes:
        divisors: per tensor of the plan, what its magnitudes are divided by; None: by nothing.
        num_nan: int64 per tensor of the plan, its NaN; 0 in other groups.
    """

    divisors: tuple[float | None, ...]
    num_nan: Array


def normalized_units(plan: Plan, units: Sequence[PruneUnit], team: Team) -> list[int]:
    """The numbers of this rank's units of groups that are normalised: the same in every pass."""
    numbered = [(number, unit) for number, unit in enumerate(units) if _is_normalized(plan, unit)]
    return units_by_rank(numbered, team.size)[team.index]


def bytes_to_measure(plan: Plan, units: Sequence[PruneUnit]) -> int:
    """How many bytes :func:`measure` reads, over all ranks; without what it reads again."""
    return sum(unit.num_bytes for unit in units if _is_normalized(plan, unit))


def measure(
    team: Team,
    plan: Plan,
    units: Sequence[PruneUnit],
    tallies: Tallies,
    phase: str,
    total_bytes: int,
    *,
    refuse_nan: bool,
) -> Measured:
    """Find what the magnitudes of each tensor are divided by.

    Args:
        team: the ranks.
        plan: with a group that is normalised.
        units: all units of pruning.
        tallies: that remember what is read.
        phase, total_bytes: for the progress; these are its first bytes.
        refuse_nan: whether a NaN is an error; else they do not count.

    Raises:
        NaNError: a tensor has NaN, and they are refused; on every rank.
        CheckpointError: a tensor has infinite elements, or fp64 ones too small or too large for a
            statistic, or cannot be read; on every rank.

    Cost: one read, and another of a part of the weights that have more than 16 bits, see
    [Note: runs]; all-reduces of 40 bytes for each tensor.
    """
    measuring = _Measuring(team, plan, units, tallies)
    mine = normalized_units(plan, units, team)
    team.work(measuring.read(mine), phase, 0, total_bytes)
    measuring.agree_on_largest(refuse_nan)
    num_done = bytes_to_measure(plan, units)
    team.work(measuring.read_again(), phase, num_done, total_bytes)
    return measuring.result()


@dataclass
class _Run:
    """Elements whose sum was taken on one grid; see [Note: runs]."""

    span: Span
    exponent: int
    total: int


class _Measuring:
    """The largest magnitudes and the sums of all tensors; this rank's until they are shared."""

    def __init__(
        self, team: Team, plan: Plan, units: Sequence[PruneUnit], tallies: Tallies
    ) -> None:
        self._team = team
        self._plan = plan
        self._units = units
        self._tallies = tallies
        self._scratch = Scratch()
        num_tensors = len(plan.tensors)
        self._largest = np.zeros(num_tensors)
        self._num_nan = np.zeros(num_tensors, dtype=np.int64)
        self._num_inf = np.zeros(num_tensors, dtype=np.int64)
        self._runs: list[list[_Run]] = [[] for _ in plan.tensors]
        self._exponents: list[int] = []

    def read(self, mine: Sequence[int]) -> Iterator[int]:
        """The first pass; yields bytes."""
        for number in mine:
            for span in self._units[number].spans:
                first = span.first
                for weights, num_bytes in self._tallies.read(span):
                    if weights is not None:
                        is_tally = weights.counts is not None
                        last = span.last if is_tally else first + len(weights.bits)
                        self._add(Span(span.position, first, last), weights)
                        first = last
                    yield num_bytes

    def agree_on_largest(self, refuse_nan: bool) -> None:
        """Share what the first pass found; raises on every rank if it cannot be normalised."""
        # The bits of numbers that are not negative are in the order of the numbers.
        largest = self._team.max(torch.from_numpy(self._largest.view(np.int64)))
        self._exponents = [exponent_of(each) for each in largest.view(torch.float64).tolist()]
        counts = torch.from_numpy(np.stack([self._num_nan, self._num_inf]))
        self._num_nan, self._num_inf = self._team.sum(counts).numpy()
        if self._num_nan.any() and refuse_nan:
            raise nan_error(self._plan, np.flatnonzero(self._num_nan).tolist())
        if self._num_inf.any():
            positions = np.flatnonzero(self._num_inf).tolist()
            names = ", ".join(self._plan.tensors[i].entry.name for i in positions)
            are_weights = all(self._plan.recipe_of(i).ranks_magnitudes for i in positions)
            raise CheckpointError(
                f"infinite {'elements in' if are_weights else 'scores of'} {names}; a tensor with "
                "them has no rms, l2 norm or mean. Repair the checkpoint, exclude the tensor, or "
                f"rank raw {'magnitudes' if are_weights else 'scores'} (normalize: none)."
            )

    def read_again(self) -> Iterator[int]:
        """The second pass, of what was added on another grid; yields no bytes."""
        for runs, exponent in zip(self._runs, self._exponents, strict=True):
            for run in runs:
                # A sum of zeros is 0 on any grid, and that of small numbers is on coarser ones.
                if run.exponent == exponent or not run.total:
                    continue
                run.total = 0
                for weights, _ in self._tallies.read(run.span):
                    if weights is not None:
                        values = self._numbers(run.span.position, weights)
                        run.total += self._sum(run.span.position, values, weights, exponent)
                    yield 0

    def result(self) -> Measured:
        totals = [sum(run.total for run in runs) for runs in self._runs]
        words = torch.tensor([to_words(total) for total in totals], dtype=torch.int64)
        shared = self._team.sum(words).tolist()
        divisors: list[float | None] = []
        for position, tensor in enumerate(self._plan.tensors):
            normalize = self._plan.recipe_of(position).normalize
            if normalize is None:
                divisors.append(None)
                continue
            num_numbers = tensor.entry.numel - int(self._num_nan[position])
            total, exponent = from_words(*shared[position]), self._exponents[position]
            divisor = statistic(normalize, total, exponent, num_numbers)
            try:
                check_divisor(divisor, normalize, tensor.entry.name)
            except ValueError as error:
                raise CheckpointError(str(error)) from None
            divisors.append(divisor)
        return Measured(tuple(divisors), self._num_nan)

    def _add(self, span: Span, weights: Weights) -> None:
        """Count what is no number, and add the others on the grid of the largest one so far."""
        position = span.position
        values = self._numbers(position, weights, count=True)
        self._largest[position] = max(largest_of(values), self._largest[position])
        exponent = exponent_of(float(self._largest[position]))
        total = self._sum(position, values, weights, exponent)
        runs = self._runs[position]
        if weights.counts is None and runs and runs[-1].exponent == exponent:
            before = runs[-1].span
            if before.last == span.first:
                span = Span(position, before.first, span.last)
                total += runs.pop().total
        runs.append(_Run(span, exponent, total))

    def _numbers(self, position: int, weights: Weights, *, count: bool = False) -> Array:
        """The magnitudes, with 0 for what is not finite, which is counted if that is asked for."""
        values = magnitudes(weights.bits, self._tallies.source.raw_dtype(position))
        if math.isfinite(largest_of(values)):
            return values
        if count:
            counts = np.ones(1, dtype=np.int64) if weights.counts is None else weights.counts
            self._num_nan[position] += int((np.isnan(values) * counts).sum())
            self._num_inf[position] += int((np.isinf(values) * counts).sum())
        values[~np.isfinite(values)] = 0.0
        return values

    def _sum(self, position: int, values: Array, weights: Weights, exponent: int) -> int:
        recipe = self._plan.recipe_of(position)
        assert recipe.normalize is not None
        what = exponent, power_of(recipe.normalize), self._scratch
        if weights.counts is None:
            return grid_sum(values, *what)
        return grid_sum_of_counts(values, weights.counts, *what)


def _is_normalized(plan: Plan, unit: PruneUnit) -> bool:
    return plan.groups[unit.group].recipe.normalize is not None
