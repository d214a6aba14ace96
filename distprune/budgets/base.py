"""What a budget is: a rule that divides the pruned elements of a call among its parameters.

Those that read no scores are here: Uniform, UniformPlus and ERK, by shapes; Sparsities, by name.

[Note: level] A rule says how many elements of each parameter are pruned as the level of all
parameters rises: ``start + slope * level``, held between the parameter's limits. The level is the
one at which the counts have the wanted sum, like that of water in connected vessels::

    pruned        ____ highest                level of all parameters
          |      /                            |
          |     /   slope                     v  the sum is what was asked for
          |____/                       vessels that are full or empty take no part
       lowest

What does not fit into one parameter is so divided among the others by the same rule. Counts are
rounded by largest remainder: each down, and then up where the remainder is largest, in case of
equal ones in the order of the parameters, until the sum is right.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from distprune._common.amount import Bounded, Bounds, per_parameter
from distprune.selection.candidates import Ranked


class NoLevelError(Exception):
    """No level gives the wanted sum: says which sums are possible."""

    def __init__(self, lowest: Fraction, highest: Fraction) -> None:
        super().__init__(lowest, highest)
        self.lowest, self.highest = lowest, highest


@dataclass(frozen=True)
class Line:
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
        NoLevelError: no level gives this sum.

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
        raise NoLevelError(constant, most)
    for change in sorted(changes):
        level, more, steeper = change
        if constant + slope * level >= total:
            break
        constant, slope = constant + more, slope + steeper
    if slope:
        level = (total - constant) / slope
    return [_held(line.start + line.slope * level, low, high) for line, low, high in limited]


def rounded(counts: Sequence[Fraction | int], total: int) -> list[int]:
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


@dataclass(frozen=True)
class Counts:
    """How many elements of every whole parameter are pruned after a call.

    Attributes:
        counts: per parameter; their sum is the total that was asked for.
        wanted: per parameter, the sparsity that the budget gives it where nothing else limits it.
    """

    counts: tuple[int, ...]
    wanted: tuple[float, ...]


class Division(ABC):
    """A budget that is settled for the parameters of a call."""

    @property
    def facts(self) -> Sequence[tuple[str, str]]:
        """(label, text) pairs that must be equal on all ranks."""
        return ()

    @abstractmethod
    def counts(self, total: int, limits: Bounds, ranked: Ranked) -> Counts:
        """Divide ``total`` pruned elements among the parameters. Collective.

        Args:
            total: pruned elements of all parameters after the call.
            limits: the fewest and most pruned elements of each parameter, by floors, ceilings and
                what is pruned already. They allow for the total.
            ranked: what the call ranks.
        """

    def own_total(self, limits: Bounds) -> int | None:
        """The total that the budget itself gives, within limits; None if it needs an amount."""
        return None


class Budget(ABC):
    """A rule for ``budget=``: how the pruned elements of a call are divided among its parameters.

    Every budget gives exact counts whose sum is the number of elements that the call's amount
    asks for: see the classes of :mod:`distprune.budgets`.
    """

    def __repr__(self) -> str:
        """The same on all ranks: they compare it."""
        return f"{type(self).__name__}()"

    @property
    def gives_total(self) -> bool:
        """Whether a call needs no amount, because the budget gives the total itself."""
        return False

    @abstractmethod
    def divide(self, parameters: Sequence[Bounded]) -> Division:
        """Settle the rule for the parameters of a call; a local step.

        Raises:
            ValueError, TypeError: the budget does not fit the parameters.
        """


@dataclass(frozen=True)
class LinearDivision(Division):
    """A rule of lines: see [Note: level]. It reads no element, and sends nothing.

    Attributes:
        parameters: the parameters of the call.
        lines: the rule.
        caps: per parameter, how many elements the rule prunes at most.
    """

    name: str
    parameters: tuple[Bounded, ...]
    lines: tuple[Line, ...]
    caps: tuple[int, ...]

    @property
    def facts(self) -> Sequence[tuple[str, str]]:
        return [
            (f"budget of {parameter.label}", f"{line.start} + {line.slope} per level, <= {cap}")
            for parameter, line, cap in zip(self.parameters, self.lines, self.caps, strict=True)
        ]

    def counts(self, total: int, limits: Bounds, ranked: Ranked) -> Counts:
        return self.divided(total, limits)

    def divided(self, total: int, limits: Bounds) -> Counts:
        """:meth:`counts`, which depend on no score here; a local step."""
        sizes = [parameter.num_elements for parameter in self.parameters]
        wanted = self._filled([0] * len(sizes), self.caps, total)
        counts = self._filled(limits.lowest, self._capped(limits), total)
        return Counts(
            tuple(rounded(counts, total)),
            tuple(float(w / n) if n else 0.0 for w, n in zip(wanted, sizes, strict=True)),
        )

    def _capped(self, limits: Bounds) -> list[int]:
        """The highest counts: what is pruned already, and floors, are stronger than caps."""
        return [
            max(low, min(high, cap))
            for low, high, cap in zip(limits.lowest, limits.highest, self.caps, strict=True)
        ]

    def _filled(self, lowest: Sequence[int], highest: Sequence[int], total: int) -> list[Fraction]:
        try:
            return fill(self.lines, lowest, highest, total)
        except NoLevelError as error:
            low, high = int(error.lowest), int(error.highest)
            raise ValueError(
                f"{self.name} can divide {low:,} to {high:,} pruned elements among these "
                f"parameters, and {total:,} are to be pruned after the call, those included that "
                "are pruned already. Expected an amount within these; change it, or the budget."
            ) from None


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
