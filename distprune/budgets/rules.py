"""Budgets that read no scores: Uniform, UniformPlus and ERK, by shapes; Sparsities, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from distprune._common.amount import Bounded, Bounds, per_parameter
from distprune.budgets.base import Budget, Counts, Division, Line, LinearDivision, rounded
from distprune.selection.candidates import Ranked


@dataclass(frozen=True)
class Uniform(Budget):
    """The same sparsity for each parameter: "layer" scope, with one exact total.

    A parameter that is pruned further already, or has a floor above or a ceiling below this
    sparsity, keeps its own, and the others share what is left, again with one sparsity.

    Cost: nothing is read or sent.
    """

    def divide(self, parameters: Sequence[Bounded]) -> LinearDivision:
        sizes = [parameter.num_elements for parameter in parameters]
        lines = tuple(Line(0, n) for n in sizes)
        return LinearDivision("budget='uniform'", tuple(parameters), lines, tuple(sizes))


@dataclass(frozen=True)
class UniformPlus(Budget):
    """Uniform, but for the first convolution, which stays dense, and the last layer.

    The last matrix, or convolution, of the list keeps at least 20 % of its elements. Parameters
    of three or more dimensions are convolutions. First and last are meant in the order of the
    list; under ``pipeline_parallel`` that is the order of the names.

    Cost: nothing is read or sent.

    Source: Gale et al., "The state of sparsity in deep neural networks", arXiv 1902.09574.
    """

    def divide(self, parameters: Sequence[Bounded]) -> LinearDivision:
        sizes = [parameter.num_elements for parameter in parameters]
        caps = list(sizes)
        layers = [i for i, parameter in enumerate(parameters) if len(parameter.shape) >= 2]
        convolutions = [i for i in layers if len(parameters[i].shape) >= 3]
        if layers:
            caps[layers[-1]] = 4 * sizes[layers[-1]] // 5
        if convolutions:
            caps[convolutions[0]] = 0
        lines = tuple(Line(0, n) for n in sizes)
        return LinearDivision("budget='uniform+'", tuple(parameters), lines, tuple(caps))


@dataclass(frozen=True)
class ERK(Budget):
    """Erdos-Renyi-Kernel: the density of a parameter falls with its size.

    The density is proportional to (the sum of the dimensions) / (their product), kernel sizes
    included: (n_in + n_out + height + width) / (n_in * n_out * height * width) for a convolution.
    So a parameter keeps a number of elements that is proportional to the sum of its dimensions.
    Parameters that would be denser than 1 stay dense, and the others are scaled again. The formula
    gives 1-d parameters the largest density of all.

    Cost: nothing is read or sent.

    Source: Evci et al., "Rigging the lottery", arXiv 1911.11134.
    """

    def divide(self, parameters: Sequence[Bounded]) -> LinearDivision:
        sizes = tuple(parameter.num_elements for parameter in parameters)
        dims = [sum(parameter.shape) or 1 for parameter in parameters]
        # The level is minus the common factor of the densities.
        lines = tuple(Line(n, dim if n else 0) for n, dim in zip(sizes, dims, strict=True))
        return LinearDivision("budget='erk'", tuple(parameters), lines, sizes)


class Sparsities(Budget):
    """A sparsity for each parameter: what a plain mapping as ``budget=`` stands for.

    Without an amount, each parameter of n elements has round(sparsity * n) pruned ones after the
    call, halves to even. With an amount the two must agree: the amount has to be a sum that
    differs from these sparsities by rounding only; counts are then rounded by largest remainder. A
    parameter that is pruned further already, or that a floor or a ceiling holds, keeps its own
    count, and no other changes.

    Args:
        sparsities: in [0, 1], of every parameter of the call, by (module, name) or by full name;
            read as the decimals that were written.
        relative: only the ratios of the sparsities matter, and the amount gives the total: all of
            them are multiplied by one factor. A parameter that would be pruned by more than all
            of it is pruned entirely, and the others are scaled again. A ``ScheduledPruner`` reads
            every mapping so, because its schedule gives the totals.

    Cost: nothing is read or sent.
    """

    def __init__(self, sparsities: Mapping[Any, float | Fraction], relative: bool = False) -> None:
        if not isinstance(sparsities, Mapping):
            raise TypeError(
                f"sparsities is a {type(sparsities).__name__}; expected a mapping from "
                "(module, name), or a full name, to a sparsity."
            )
        self.sparsities = sparsities
        self.relative = relative

    def __repr__(self) -> str:
        return f"Sparsities({len(self.sparsities)} parameters, relative={self.relative})"

    @property
    def gives_total(self) -> bool:
        """Whether the sparsities give the total, where there is no amount."""
        return not self.relative

    def divide(self, parameters: Sequence[Bounded]) -> Division:
        shares = per_parameter("budget", self.sparsities, parameters, default=None)
        exact = tuple(
            share * parameter.num_elements
            for share, parameter in zip(shares, parameters, strict=True)
        )
        if not self.relative:
            return _GivenCounts(tuple(parameters), exact)
        return LinearDivision(
            "budget=Sparsities(relative=True)",
            tuple(parameters),
            tuple(Line(0, count) for count in exact),
            tuple(parameter.num_elements for parameter in parameters),
        )


@dataclass(frozen=True)
class _GivenCounts(Division):
    """The exact count of each parameter: sparsity times elements."""

    parameters: tuple[Bounded, ...]
    exact: tuple[Fraction, ...]

    @property
    def facts(self) -> Sequence[tuple[str, str]]:
        pairs = zip(self.parameters, self.exact, strict=True)
        return [(f"budget of {each.label}", f"{count} pruned elements") for each, count in pairs]

    def own_total(self, limits: Bounds) -> int:
        return sum(round(count) for count in self._held(limits))

    def counts(self, total: int, limits: Bounds, ranked: Ranked) -> Counts:
        held = self._held(limits)
        least, most = sum(map(math.floor, held)), sum(map(math.ceil, held))
        if not least <= total <= most:
            size = sum(parameter.num_elements for parameter in self.parameters)
            raise ValueError(
                f"the amount asks for {total:,} pruned elements of {size:,} after the call, and "
                f"the sparsities of budget= for {least:,}"
                f"{f' to {most:,}' if most > least else ''}; expected the same. "
                "Leave out the amount, which then follows from the sparsities; or pass "
                "budgets.Sparsities(mapping, relative=True) to scale them to the amount."
            )
        by_itself = [round(count) for count in held]
        counts = by_itself if sum(by_itself) == total else rounded(held, total)
        wanted = [
            float(count / parameter.num_elements) if parameter.num_elements else 0.0
            for count, parameter in zip(self.exact, self.parameters, strict=True)
        ]
        return Counts(tuple(counts), tuple(wanted))

    def _held(self, limits: Bounds) -> list[Fraction]:
        return [
            min(max(count, Fraction(low)), Fraction(high))
            for count, low, high in zip(self.exact, limits.lowest, limits.highest, strict=True)
        ]
