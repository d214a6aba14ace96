"""Exact counts from a rule, limits and a total, in rational arithmetic.

A rule says how many elements of each parameter are pruned as the level of all parameters rises:
``start + slope * level``, held between the parameter's limits. The level is the one at which the
counts have the wanted sum, like that of water in connected vessels::

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
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


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
        lines: of the parameters.
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
