"""LAMP: one ranking over all parameters, by scores that make layers comparable.

[Note: counts] Inside a parameter the LAMP score rises with the magnitude, so only the number of
elements that each parameter loses has to be found. Nothing is sorted, and no score is stored: for
every parameter the elements are counted in bins of their magnitude, and the squares above these
bins are added up exactly. Counts and sums of all ranks bound how many scores of each parameter
are below any threshold (lamp_scores.py); so they bound the threshold, and that leaves a few bins
of each parameter. These are cut into bins again, until each holds one magnitude::

    round 1    |----|----|----|----|----|----|----|----|     all elements
    round 2                   |-|-|-|-|-|-|                  the bins that the threshold may be in
    round 3                       |||||

The result is a function of sums of integers, so that any sharding gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from distprune._common.bounds import Bounded, Bounds
from distprune._common.memory import Array
from distprune.budgets.base import Budget, Counts, Division, Ranked
from distprune.budgets.lamp_scores import Bins, Table
from distprune.budgets.magnitudes import (
    NUM_DIGITS,
    Counter,
    Window,
    as_float,
    magnitude_of,
    squares_of,
    sum_from_digits,
)
from distprune.selection.keys import KeyRange, Order
from distprune.selection.radix import changed

# A window has at most 2**_BITS bins, and one more.
_BITS = 9
# Where a round leaves most of a window, its bins are cut further, as far as this.
_MORE_BITS = 3
_MOST_BINS = 1 << 20
# The first window: so many powers of two below the largest magnitude.
_OCTAVES = 16
# Keys that are stored between passes, on average per rank.
_STORED = 1 << 22


@dataclass(frozen=True)
class LAMP(Budget):
    """Layer-adaptive magnitude pruning: the counts of one ranking by LAMP scores.

    The score of an element is w**2 / (the sum of the squares of itself and of all unpruned elements
    of its parameter that come after it in the order). It ranks what the call ranks: |w|, or
    |importance_scores|, factored ones included. A factor of a whole parameter changes nothing, so
    ``normalize`` has no effect. Each parameter keeps at least one element until all others are
    gone.

    Equal elements of a parameter are taken in the order of their indices, and have different
    scores, as in the authors' code, which sorts them; so the counts do not depend on that order.
    Equal scores of several parameters go in the order of the parameters. Scores are compared in
    float64.

    For methods that rank magnitudes, such as L1Unstructured; infinite scores have no LAMP score.

    Cost: about five passes over the scores, of which the last ones visit a small part; about six
    all-reduces, 12 KB per parameter in all, and what exact counts cost every call; no sorting, and
    no memory per element but for at most some millions of keys that are stored.

    Source: Lee et al., "Layer-adaptive sparsity for the magnitude-based pruning", arXiv 2010.07611.
    """

    def divide(self, parameters: Sequence[Bounded]) -> Division:
        return _LampDivision(tuple(parameters))


@dataclass(frozen=True)
class _LampDivision(Division):
    parameters: tuple[Bounded, ...]

    def counts(self, total: int, limits: Bounds, ranked: Ranked) -> Counts:
        if ranked.keys.order is not Order.MAGNITUDE:
            raise NotImplementedError(
                "budget='lamp' divides by the squares of magnitudes, and this method ranks "
                f"otherwise ({ranked.keys.order.value}); expected L1Unstructured."
            )
        sizes = [parameter.num_elements for parameter in self.parameters]
        pruned = [n - live for n, live in zip(sizes, ranked.num_live, strict=True)]
        lowest = [low - p for low, p in zip(limits.lowest, pruned, strict=True)]
        highest = [high - p for high, p in zip(limits.highest, pruned, strict=True)]
        names = [parameter.label for parameter in self.parameters]
        more = num_to_prune(ranked, names, lowest, highest, total - sum(pruned))
        counts = [p + m for p, m in zip(pruned, more, strict=True)]
        wanted = (count / n if n else 0.0 for count, n in zip(counts, sizes, strict=True))
        return Counts(tuple(counts), tuple(wanted))


@dataclass
class _State:
    """What is known of a parameter that is not decided.

    Attributes:
        window: to count next; its keys hold all elements that may be the last one pruned.
        num_before: elements below the window.
        num_inside: elements in the window.
        sum_above: of the squares above the window's top, in units of magnitudes.py.
        bins: what was counted in the window.
    """

    window: Window
    num_before: int
    num_inside: int
    sum_above: int = 0
    bins: Bins | None = None

    @property
    def is_exact(self) -> bool:
        """Whether every bin holds one magnitude: there is nothing left to count."""
        return self.bins is not None and self.bins.is_exact

    def take(self, row: Array, keys: KeyRange) -> None:
        """Take the counts of all ranks in the window."""
        window = self.window
        self.sum_above += sum_from_digits(row[-NUM_DIGITS:].tolist())
        edges = window.edges()
        low, high = (squares_of(edge, keys, window.exponent) for edge in edges)
        self.bins = Bins.of(
            edges,
            row[:-NUM_DIGITS],
            (low, high),
            as_float(self.sum_above),
            self.num_before,
            is_exact=not window.shift,
        )

    def narrow(self, least: int, most: int) -> None:
        """Continue in the bins that hold the elements number ``least`` to ``most`` - 1."""
        assert self.bins is not None
        low, high, self.num_before, self.num_inside = self.bins.between(least, most)
        before, shift = self.window, _shift(low, high)
        if (low, high, before.has_rest) == (before.low, before.high, False):
            # Elements at both ends of the window are possible still: it gets more bins.
            shift = max(0, before.shift - _MORE_BITS)
        if high - low >> shift > _MOST_BINS:
            raise changed()
        self.window = replace(
            before, low=low, high=high, shift=shift, top=before.high, has_rest=False
        )


def num_to_prune(
    ranked: Ranked, names: Sequence[str], lowest: Sequence[int], highest: Sequence[int], k: int
) -> list[int]:
    """How many of the ``k`` lowest LAMP scores each parameter has, within limits. Collective.

    Args:
        ranked: what the call ranks.
        names: of the parameters, for messages.
        lowest, highest: limits of each count, of elements that are not pruned yet.
        k: sum(lowest) <= k <= sum(highest).

    Raises:
        ValueError: a score is NaN or infinite; on every rank.
        RuntimeError: the scores changed between two passes.
    """
    counts = list(lowest)
    if k == sum(lowest):
        return counts
    if k == sum(highest):
        return list(highest)
    communicator, keys = ranked.communicator, ranked.keys
    counter = Counter(ranked.parts, keys)
    largest = communicator.reduce(len(counts), counter.largest, "max").tolist()
    _check_finite(largest, names, keys)
    states = {
        i: _State(_first_window(largest[i], keys), 0, live)
        for i, live in enumerate(ranked.num_live)
        if lowest[i] < highest[i]
    }
    while states:
        windows = {i: state.window for i, state in states.items() if not state.is_exact}
        if windows:
            _count(windows, states, counter, ranked)
        undecided = list(states)
        table = Table(
            [bins for state in states.values() if (bins := state.bins) is not None],
            [lowest[i] for i in undecided],
            [highest[i] for i in undecided],
        )
        num_left = k - sum(counts[i] for i in range(len(counts)) if i not in states)
        if all(state.is_exact for state in states.values()):
            for i, count in zip(undecided, table.divide(num_left).tolist(), strict=True):
                counts[i] = count
            return counts
        least, most = (bound.tolist() for bound in table.bracket(num_left))
        for i, low, high in zip(undecided, least, most, strict=True):
            if low == high:
                counts[i] = low
                counter.forget(i)
                del states[i]
            elif not states[i].is_exact:
                states[i].narrow(low, high)
    return counts


def _count(
    windows: Mapping[int, Window], states: Mapping[int, _State], counter: Counter, ranked: Ranked
) -> None:
    """Count in the windows on all ranks."""
    num_inside = sum(states[i].num_inside for i in windows)
    store = num_inside <= _STORED * ranked.communicator.size
    sizes = [window.size for window in windows.values()]
    shared = ranked.communicator.reduce(sum(sizes), lambda: counter.count(windows, store=store))
    rows = torch.split(shared, sizes)
    for i, row in zip(windows, rows, strict=True):
        states[i].take(row.numpy(), ranked.keys)


def _first_window(largest: int, keys: KeyRange) -> Window:
    """The largest magnitudes of a parameter; all smaller ones are its rest."""
    low = 0
    if keys.is_float:
        mantissa_bits = round(-math.log2(torch.finfo(keys.value_dtype).eps))
        low = max(0, largest - (_OCTAVES << mantissa_bits) + 1)
    exponent = math.frexp(magnitude_of(largest, keys))[1]
    return Window(low, largest, _shift(low, largest), largest, low > 0, exponent)


def _shift(low: int, high: int) -> int:
    return max(0, (high - low).bit_length() - _BITS)


def _check_finite(largest: Sequence[int], names: Sequence[str], keys: KeyRange) -> None:
    if not keys.is_float:
        return
    for what, first in (("NaN", keys.largest_number + 1), ("infinite", keys.largest_number)):
        where = [name for name, key in zip(names, largest, strict=True) if key >= first]
        if where:
            raise ValueError(
                f"scores of {', '.join(where)} are {what}; expected finite numbers for every "
                "unpruned element, because LAMP scores divide by their squares. Repair the "
                "weights, or mask them first with custom_from_mask."
            )
