"""Rules that divide a number of pruned elements among parameters, as lines.

[Note: level] A rule says how many elements of each parameter are pruned as the level of all
parameters rises: ``start + slope * level``, held between the parameter's limits. The level is the
one at which the counts have the wanted sum. What does not fit into one parameter is so divided
among the others by the same rule. Counts are rounded by largest remainder: each down, and then up
where the remainder is largest, in case of equal ones in the order of the parameters, until the sum
is right.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from distprune.base.amount import Bounded

OWL_LAM = Fraction(8, 100)  # by default, half the range of the densities


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
            f"parameters, and {total:,} are to be pruned; expected a sparsity within these."
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


def divided(
    lines: Sequence[Line], lowest: Sequence[int], highest: Sequence[int], total: int
) -> list[int]:
    """Whole counts with this sum; the arguments are those of :func:`fill`."""
    return rounded(fill(lines, lowest, highest, total), total)


def lines_of(rule: str, parameters: Sequence[Bounded]) -> list[Line]:
    """The lines of "uniform", one sparsity for all, or of "erk"."""
    if rule == "uniform":
        return [Line(0, parameter.num_elements) for parameter in parameters]
    # The level of ERK is minus the common factor of the densities.
    return [Line(p.num_elements, (sum(p.shape) or 1) if p.num_elements else 0) for p in parameters]


def owl_lines(
    sizes: Sequence[int], ratios: Sequence[Fraction], lam: Fraction = OWL_LAM
) -> list[Line]:
    """The lines of OWL; the level is minus the shift of all densities.

    Args:
        sizes: elements of each parameter.
        ratios: the outlier ratio of each.
        lam: half the range of the densities.
    """
    low = min(ratios, default=Fraction(0))
    spread = max(ratios, default=low) - low
    densities = [(ratio - low) / spread * 2 * lam if spread else Fraction(0) for ratio in ratios]
    return [Line(n * (1 - density), n) for n, density in zip(sizes, densities, strict=True)]


def exact_number(what: str, value: object) -> Fraction:
    """A finite number, as the decimal that was written."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what} is a {type(value).__name__}; expected a number.")
    if not math.isfinite(value):
        raise ValueError(f"{what} is {value!r}; expected a finite number.")
    return Fraction(value) if isinstance(value, numbers.Rational) else Fraction(repr(float(value)))
