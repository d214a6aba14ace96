"""LAMP scores of whole groups of elements, from counts and sums alone.

In a parameter, in the order of its ranking, the score of an element is x**2 / (the sum of the
squares of itself and of all that come after it). Let c elements have magnitudes between x and y,
and let S be the sum of the squares of all elements above them. If t of the c elements, itself
included, are not before an element in the order, then its score lies in

    x**2 / (S + t * y**2)  <=  score  <=  y**2 / (S + t * x**2)

So counts and sums bound how many scores are below a threshold. Where x = y, they give it exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from distprune._common.memory import Array

# What rounding may change, and more: bounds are wider by this factor.
_SLACK = 2.0**-40
_INFINITY = int(np.array(np.inf).view(np.int64))


@dataclass(frozen=True)
class Bins:
    """Elements of one parameter, in bins of their magnitudes, lowest first; no bin is empty.

    Attributes:
        low_key, high_key: int64 [m], the closed interval of keys of each bin.
        counts: int64 [m], elements.
        low, high: float64 [m], squares of the smallest and largest magnitude of each bin ...
        above, above_most: ... and bounds of the sum of the squares of all elements above each bin.
        num_before: elements before the first bin.
        is_exact: every bin holds equal magnitudes.
    """

    low_key: Array
    high_key: Array
    counts: Array
    low: Array
    high: Array
    above: Array
    above_most: Array
    num_before: int
    is_exact: bool

    @classmethod
    def of(
        cls,
        keys: tuple[Array, Array],
        counts: Array,
        squares: tuple[Array, Array],
        sum_above: float,
        num_before: int,
        is_exact: bool,
    ) -> Bins:
        """From bins that may be empty, and the sum of the squares above the last one."""
        filled = np.flatnonzero(counts)
        (low_key, high_key), (low, high) = keys, squares
        number = counts[filled]
        sums = [sum_above + _sums_after(number * square[filled]) for square in (low, high)]
        return cls(
            low_key[filled], high_key[filled], number, low[filled], high[filled], sums[0], sums[1],
            num_before, is_exact,
        )  # fmt: skip

    def between(self, first: int, last: int) -> tuple[int, int, int, int]:
        """The interval of keys that holds elements number ``first`` to ``last`` of the parameter.

        Args:
            first, last: from 0 on, last excluded; among the elements of the bins.

        Returns:
            The lowest and the highest key, and how many elements come before the interval, and lie
            in it.
        """
        ends = self.num_before + np.cumsum(self.counts)
        low = int(np.searchsorted(ends, first, side="right"))
        high = int(np.searchsorted(ends, last, side="left"))
        before = int(ends[low] - self.counts[low])
        return int(self.low_key[low]), int(self.high_key[high]), before, int(ends[high]) - before


class Table:
    """The bins of several parameters, and how many of their elements a call may prune.

    Args:
        bins: of each parameter.
        lowest, highest: limits of the count of each.
    """

    def __init__(self, bins: Sequence[Bins], lowest: Sequence[int], highest: Sequence[int]) -> None:
        self._owner = np.repeat(np.arange(len(bins)), [each.counts.size for each in bins])
        self._counts = np.concatenate([each.counts for each in bins])
        self._low = np.concatenate([each.low for each in bins])
        self._high = np.concatenate([each.high for each in bins])
        self._above = np.concatenate([each.above for each in bins])
        self._above_most = np.concatenate([each.above_most for each in bins])
        self._is_exact = np.repeat(
            np.array([each.is_exact for each in bins]), [each.counts.size for each in bins]
        )
        self._before = np.array([each.num_before for each in bins], dtype=np.int64)
        self._limits = np.array(lowest, dtype=np.int64), np.array(highest, dtype=np.int64)

    def least(self, threshold: float) -> Array:
        """Per parameter, at least how many scores are no larger, held within the limits."""
        return self._held(self._counted(threshold, self._least_of))

    def most(self, threshold: float) -> Array:
        """Per parameter, at most how many scores are no larger, held within the limits."""
        return self._held(self._counted(threshold, self._most_of))

    def bracket(self, k: int) -> tuple[Array, Array]:
        """Per parameter, at least and at most how many of the ``k`` lowest scores it has."""
        # Where bins are wide, so are the bounds: neighbouring floats make no difference.
        apart = 1 if self._is_exact.all() else 1 << 30
        below, _ = around(lambda threshold: int(self.most(threshold).sum()) >= k, apart)
        _, above = around(lambda threshold: int(self.least(threshold).sum()) >= k, apart)
        nothing = np.zeros_like(self._counts)
        return self._held(nothing) if below is None else self.least(below), self.most(above)

    def divide(self, k: int) -> Array:
        """Per parameter, how many of the ``k`` lowest scores it has, if all bins are exact.

        Equal scores of several parameters go in the order of the parameters.
        """
        least, most = self.bracket(k)
        ties = most - least
        before = np.cumsum(ties) - ties
        divided: Array = least + np.clip(k - int(least.sum()) - before, 0, ties)
        return divided

    def _held(self, counts: Array) -> Array:
        of_parameter = np.bincount(self._owner, weights=counts, minlength=self._before.size)
        held: Array = np.clip(self._before + of_parameter.astype(np.int64), *self._limits)
        return held

    def _counted(self, threshold: float, bound: Callable[[float], Array]) -> Array:
        if threshold == np.inf:
            return self._counts
        counts = np.zeros_like(self._counts)
        exact = self._is_exact
        if exact.any():
            counts[exact] = _num_below(
                threshold, self._low[exact], self._above[exact], self._counts[exact]
            )
        if not exact.all():
            counts[~exact] = bound(threshold)
        return counts

    def _least_of(self, threshold: float) -> Array:
        """Of bins that are not exact, the elements whose score is certainly no larger."""
        at = ~self._is_exact
        low, high, above, counts = self._low[at], self._high[at], self._above[at], self._counts[at]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            num_left = (high / threshold * (1 + _SLACK) - above * (1 - _SLACK)) / low
        num_left = np.where(high > 0, np.nan_to_num(num_left, nan=np.inf), -np.inf)
        first = np.clip(np.ceil(num_left), 1, counts + 1)
        number: Array = counts + 1 - first.astype(np.int64)
        return number

    def _most_of(self, threshold: float) -> Array:
        """Of bins that are not exact, the elements whose score is perhaps no larger."""
        at = ~self._is_exact
        low, high, counts = self._low[at], self._high[at], self._counts[at]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            num_left = low / threshold * (1 - _SLACK) - self._above_most[at] * (1 + _SLACK)
            num_left = np.where(low > 0, num_left / high, -np.inf)
        first = np.clip(np.ceil(num_left), 1, counts + 1)
        number: Array = counts + 1 - first.astype(np.int64)
        return number


def around(is_enough: Callable[[float], bool], apart: int) -> tuple[float | None, float]:
    """Two floats >= 0: a condition does not hold for the first one, and holds for the second.

    Args:
        is_enough: holds for infinity and, from some number on, for all numbers.
        apart: they are at most so many floats apart.

    Returns:
        The first is None if the condition may hold for all numbers.
    """
    low, high = -1, _INFINITY  # as bits, which are in the order of the numbers
    while high - low > apart:
        middle = (low + high) // 2
        if is_enough(_float_of(middle)):
            high = middle
        else:
            low = middle
    return None if low < 0 else _float_of(low), _float_of(high)


def _float_of(bits: int) -> float:
    return float(np.array(bits, dtype=np.int64).view(np.float64))


def _num_below(threshold: float, square: Array, above: Array, counts: Array) -> Array:
    """Of groups of equal elements, how many have a score that is no larger than the threshold.

    Their scores are ``square / (above + t * square)``, t = 1 to the count, in float64.
    """
    # The smallest t for which this holds, by bisection: it lies in (low, high].
    low, high = np.zeros_like(counts), counts + 1
    while (high - low > 1).any():
        middle = (low + high) // 2
        with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0: the score of zeros is 0
            holds = square / (above + middle * square) <= threshold
        holds = (holds | (square == 0) | (middle > counts)) & (middle > 0)
        low, high = np.where(holds, low, middle), np.where(holds, middle, high)
    number: Array = counts + 1 - high
    return number


def _sums_after(terms: Array) -> Array:
    """For each term, the sum of all terms after it."""
    return np.append(np.cumsum(terms[::-1])[::-1][1:], 0.0) if terms.size else terms
