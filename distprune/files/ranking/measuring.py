"""What the magnitudes of each tensor are divided by, in groups that are normalised.

The rule is that of ``_common.exact_sums``: two passes, one for the largest magnitude of each
tensor, and one for the sum on its grid. All numbers are integers when they are added, so the result
does not depend on how the elements are cut into pieces and spread over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distprune._common.exact_sums import (
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
from distprune.files.ranking.units import PruneUnit, units_by_rank
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
    """How many bytes :func:`measure` reads, over all ranks: wide weights twice, others once."""
    return sum(
        (span.last - span.first) * itemsize * (1 if itemsize == 2 else 2)
        for unit in units
        if _is_normalized(plan, unit)
        for span in unit.spans
        for entry in [plan.tensors[span.position].entry]
        for itemsize in [entry.nbytes // entry.numel]
    )


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
        CheckpointError: a tensor has infinite elements, or cannot be read; on every rank.

    Cost: :func:`bytes_to_measure`; all-reduces of 40 bytes for each tensor.
    """
    measuring = _Measuring(team, plan, units, tallies)
    mine = normalized_units(plan, units, team)
    num_done = sum(unit.num_bytes for unit in units if _is_normalized(plan, unit))
    team.work(measuring.find_largest(mine), phase, 0, total_bytes)
    measuring.agree_on_largest(refuse_nan)
    team.work(measuring.add_up(mine), phase, num_done, total_bytes)
    return measuring.result()


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
        self._totals = [0] * num_tensors
        self._exponents: list[int] = []

    def find_largest(self, mine: Sequence[int]) -> Iterator[int]:
        """The first pass; yields bytes."""
        for position, weights, num_bytes in self._weights(mine):
            if weights is not None:
                self._add_to_largest(position, weights)
            yield num_bytes

    def agree_on_largest(self, refuse_nan: bool) -> None:
        """Share what the first pass found; raises on every rank if it cannot be normalised."""
        # The bits of numbers that are not negative are in the order of the numbers.
        largest = self._team.max(torch.from_numpy(self._largest.view(np.int64)))
        self._exponents = [exponent_of(each) for each in largest.view(torch.float64).tolist()]
        counts = torch.from_numpy(np.stack([self._num_nan, self._num_inf]))
        self._num_nan, self._num_inf = self._team.sum(counts).numpy()
        if self._num_nan.any() and refuse_nan:
            raise nan_error(self._names(self._num_nan))
        if self._num_inf.any():
            raise CheckpointError(
                f"infinite elements in {', '.join(self._names(self._num_inf))}; a tensor with them "
                "has no rms, l2 norm or mean. Repair the checkpoint, exclude the tensor, or rank "
                "raw magnitudes (normalize: none)."
            )

    def add_up(self, mine: Sequence[int]) -> Iterator[int]:
        """The second pass; yields bytes."""
        for position, weights, num_bytes in self._weights(mine):
            if weights is not None:
                self._totals[position] += self._sum(position, weights)
            yield num_bytes

    def result(self) -> Measured:
        words = torch.tensor([to_words(total) for total in self._totals], dtype=torch.int64)
        shared = self._team.sum(words).tolist()
        divisors: list[float | None] = []
        for position, tensor in enumerate(self._plan.tensors):
            normalize = self._plan.recipe_of(position).normalize
            if normalize is None:
                divisors.append(None)
                continue
            num_numbers = tensor.entry.numel - int(self._num_nan[position])
            total, exponent = from_words(*shared[position]), self._exponents[position]
            divisors.append(statistic(normalize, total, exponent, num_numbers))
        return Measured(tuple(divisors), self._num_nan)

    def _weights(self, mine: Sequence[int]) -> Iterator[tuple[int, Weights | None, int]]:
        for number in mine:
            for span in self._units[number].spans:
                for weights, num_bytes in self._tallies.read(span):
                    yield span.position, weights, num_bytes

    def _add_to_largest(self, position: int, weights: Weights) -> None:
        values = self._magnitudes(position, weights)
        largest = largest_of(values)
        if not math.isfinite(largest):
            counts = np.ones(1) if weights.counts is None else weights.counts
            self._num_nan[position] += int((np.isnan(values) * counts).sum())
            self._num_inf[position] += int((np.isinf(values) * counts).sum())
            largest = largest_of(values[np.isfinite(values)])
        self._largest[position] = max(largest, self._largest[position])

    def _sum(self, position: int, weights: Weights) -> int:
        recipe = self._plan.recipe_of(position)
        assert recipe.normalize is not None
        values = self._magnitudes(position, weights)
        if self._num_nan[position]:
            values[np.isnan(values)] = 0.0
        what = self._exponents[position], power_of(recipe.normalize), self._scratch
        if weights.counts is None:
            return grid_sum(values, *what)
        return grid_sum_of_counts(values, weights.counts, *what)

    def _magnitudes(self, position: int, weights: Weights) -> Array:
        return magnitudes(weights.bits, self._plan.tensors[position].entry.dtype)

    def _names(self, counts: Array) -> list[str]:
        return [self._plan.tensors[i].entry.name for i in np.flatnonzero(counts).tolist()]


def _is_normalized(plan: Plan, unit: PruneUnit) -> bool:
    return plan.groups[unit.group].recipe.normalize is not None
