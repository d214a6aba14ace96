"""What a budget is: a rule that divides the pruned elements of a call among its parameters.

Uniform and ERK, by shapes, and Sparsities, by name, are here.

[Note: level] A rule says how many elements of each parameter are pruned as the level of all
parameters rises: ``start + slope * level``, held between the parameter's limits. The level is the
one at which the counts have the wanted sum. What does not fit into one parameter is so divided
among the others by the same rule. Counts are rounded by largest remainder: each down, and then up
where the remainder is largest, in case of equal ones in the order of the parameters, until the sum
is right.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from distprune.base.amount import Bounded, Bounds, per_parameter


class Line(NamedTuple):
    """Pruned elements of a parameter as a function of the level.

    Attributes:
        start: at level 0.
        slope: more of them per level; >= 0.
    """

    start: Fraction | int
    slope: Fraction | int


def fill(
    lines: Sequence[Line], lowest: Sequence[int], highest: Sequence[int], total: int
) -> list[Fraction]:
    """Counts, not rounded yet, whose sum is exactly ``total``.

    Args:
        lines: the line of each parameter.
        lowest, highest: limits of each count; lowest <= highest.
        total: the sum.

    Raises:
        ValueError: no level gives this sum.

    Cost: rational operations in the number of parameters times its logarithm.
    """
    limited = list(zip(lines, lowest, highest, strict=True))
    # The sum at a level is constant + slope * level; both change where a parameter leaves its
    # lowest count, and where it reaches its highest.
    constant, slope, level = Fraction(0), Fraction(0), Fraction(0)
    most = Fraction(0)
    changes: list[tuple[Fraction, Fraction, Fraction]] = []
    for line, low, high in limited:
        rise, start = Fraction(line.slope), Fraction(line.start)
        if rise:
            changes.append(((low - start) / rise, start - low, rise))
            changes.append(((high - start) / rise, high - start, -rise))
        constant += low if rise else _held(start, low, high)
        most += high if rise else _held(start, low, high)
    if not constant <= total <= most:
        raise ValueError(
            f"the budget can divide {int(constant):,} to {int(most):,} pruned elements among these "
            f"parameters, and {total:,} are to be pruned after the call, those included that are "
            "pruned already. Expected an amount within these; change it, or the budget."
        )
    for change in sorted(changes):
        level, more, steeper = change
        if constant + slope * level >= total:
            break
        constant, slope = constant + more, slope + steeper
    if slope:
        level = (total - constant) / slope
    return [_held(line.start + line.slope * level, low, high) for line, low, high in limited]


def rounded(counts: Sequence[Fraction], total: int) -> list[int]:
    """Whole counts with this sum: each rounded down, and the largest remainders up.

    Args:
        counts: exact ones.
        total: between the sums of all counts rounded down, and up.
    """
    down = [math.floor(count) for count in counts]
    remainders = [count - low for count, low in zip(counts, down, strict=True)]
    order = sorted(range(len(down)), key=lambda i: (-remainders[i], i))
    num_up = total - sum(down)
    assert 0 <= num_up <= sum(map(bool, remainders)), (total, counts)
    for i in order[:num_up]:
        down[i] += 1
    return down


def _held(count: Fraction | int, low: int, high: int) -> Fraction:
    return min(max(Fraction(count), Fraction(low)), Fraction(high))


class Budget(ABC):
    """A rule for ``budget=``: how the pruned elements of a call are divided among its parameters.

    Every budget gives exact counts whose sum is the number of elements that the call's amount
    asks for: see the classes of :mod:`distprune.budgets`. No element is read, and nothing is sent.
    """

    def __repr__(self) -> str:
        """The same on all ranks: they compare it."""
        return f"{type(self).__name__}()"

    @property
    def gives_total(self) -> bool:
        """Whether a call needs no amount, because the starts of the lines are the counts."""
        return False

    @abstractmethod
    def lines(self, parameters: Sequence[Bounded]) -> list[Line]:
        """The rule for the parameters of a call; a local step. See [Note: level].

        Raises:
            ValueError, TypeError: the budget does not fit the parameters.
        """

    def divide(self, parameters: Sequence[Bounded]) -> Division:
        """Settle the rule for the parameters of a call; a local step that may raise."""
        return Division(tuple(parameters), tuple(self.lines(parameters)), self.gives_total)


@dataclass(frozen=True)
class Division:
    """A budget that is settled for the parameters of a call.

    Attributes:
        parameters: of the call.
        lines: the rule.
        gives_total: whether the starts of the lines are the counts.
    """

    parameters: tuple[Bounded, ...]
    lines: tuple[Line, ...]
    gives_total: bool

    @property
    def facts(self) -> list[tuple[str, str]]:
        """(label, text) pairs that must be equal on all ranks."""
        return [
            (f"budget of {parameter.label}", f"{line.start} + {line.slope} per level")
            for parameter, line in zip(self.parameters, self.lines, strict=True)
        ]

    def counts(self, limits: Bounds, total: int | None) -> tuple[list[int], list[float]]:
        """How many elements of every whole parameter are pruned after a call.

        Args:
            limits: the fewest and most pruned elements of each parameter, by floors, ceilings and
                what is pruned already. They allow for the total.
            total: pruned elements of all parameters after the call; None: the budget gives it.

        Returns:
            The counts, whose sum is the total; and per parameter the sparsity that the budget
            gives it where nothing else limits it.

        Raises:
            ValueError: the budget cannot divide the total.
        """
        sizes = [parameter.num_elements for parameter in self.parameters]
        wanted: Sequence[Fraction | int]
        if self.gives_total:
            counts, wanted = self._given(limits, total), [line.start for line in self.lines]
        else:
            assert total is not None
            wanted = fill(self.lines, [0] * len(sizes), sizes, total)
            counts = rounded(fill(self.lines, limits.lowest, limits.highest, total), total)
        return counts, [float(w / n) if n else 0.0 for w, n in zip(wanted, sizes, strict=True)]

    def _given(self, limits: Bounds, total: int | None) -> list[int]:
        starts = (line.start for line in self.lines)
        held = list(map(_held, starts, limits.lowest, limits.highest))
        counts = list(map(round, held))
        if total in (None, sum(counts)):
            return counts
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
        return rounded(held, total)


@dataclass(frozen=True)
class Uniform(Budget):
    """The same sparsity for each parameter: "layer" scope, with one exact total.

    A parameter that is pruned further already, or has a floor above or a ceiling below this
    sparsity, keeps its own, and the others share what is left, again with one sparsity.
    """

    def lines(self, parameters: Sequence[Bounded]) -> list[Line]:
        return [Line(0, parameter.num_elements) for parameter in parameters]


@dataclass(frozen=True)
class ERK(Budget):
    """Erdos-Renyi-Kernel: the density of a parameter falls with its size.

    The density is proportional to (the sum of the dimensions) / (their product), kernel sizes
    included: (n_in + n_out + height + width) / (n_in * n_out * height * width) for a convolution.
    So a parameter keeps a number of elements that is proportional to the sum of its dimensions.
    Parameters that would be denser than 1 stay dense, and the others are scaled again. The formula
    gives 1-d parameters the largest density of all.

    Source: Evci et al., "Rigging the lottery", arXiv 1911.11134.
    """

    def lines(self, parameters: Sequence[Bounded]) -> list[Line]:
        # The level is minus the common factor of the densities.
        return [
            Line(p.num_elements, (sum(p.shape) or 1) if p.num_elements else 0) for p in parameters
        ]


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

    def lines(self, parameters: Sequence[Bounded]) -> list[Line]:
        shares = per_parameter("budget", self.sparsities, parameters, default=None)
        sizes = [parameter.num_elements for parameter in parameters]
        counts = [share * size for share, size in zip(shares, sizes, strict=True)]
        return [Line(0, count) if self.relative else Line(count, 0) for count in counts]
