"""LAMP: one ranking over all parameters, by scores that make layers comparable.

[Note: counts] Inside a parameter the LAMP score rises with the magnitude, so only the number of
elements that each parameter loses has to be found. One read counts the elements of every parameter
in bins of their magnitudes, and the counts are summed over ranks: any sharding gives the same. Let
a bin hold n elements with magnitudes from x to y, let m be their mean square, and S the sum of the
squares of all elements in the bins above. Going up through the bin, 1/score falls about linearly::

    (S + n * m) / x**2  at its first element,  to  S / y**2  after its last

This is exact where all elements of the bin are equal. It gives, for any score, how many elements
of each parameter have a lower one; bisection finds the score at which their sum is what is asked.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from distprune._common import memory
from distprune._common.amount import Bounded, Bounds
from distprune._common.mask_values import is_one
from distprune._common.memory import INTEGERS, Array, Scratch
from distprune._common.naming import UnfitScores
from distprune.budgets.base import Budget, Counts, Division
from distprune.selection.candidates import Candidates, Ranked
from distprune.selection.kernels import call_all, chunks_of, num_threads_for
from distprune.selection.keys import KeyRange, Order
from distprune.selection.radix import Descent, histogram_of
from distprune.selection.tallies import are_tallied, keys_of_tally

# Each power of two has 2**_BITS bins.
_BITS = 5
# Counts that are summed over ranks at a time; only bins that hold elements are stored.
_MOST_COUNTS = 1 << 22
# Smaller squares, relative to the largest one of a parameter, are taken for this one.
_TINY = 1e-290
_INFINITY = int(np.float64(np.inf).view(np.int64))


@dataclass(frozen=True)
class LAMP(Budget):
    """Layer-adaptive magnitude pruning: the counts of one ranking by LAMP scores.

    The score of an element is w**2 / (the sum of the squares of itself and of all unpruned elements
    of its parameter that come after it in the order). It ranks what the call ranks: |w|, or
    |importance_scores|, factored ones included. A factor of a whole parameter changes nothing, so
    ``normalize`` has no effect. Each parameter keeps at least one element until all others are
    gone.

    Resolution: magnitudes are counted in bins, 32 for each power of two, and inside a bin they are
    taken to be spread evenly. The counts of weights as layers have them differ from those of a sort
    of all scores by less than 0.2 % of the parameter, or by up to 20 elements if that is more. No
    score is off by more than 14 %. The total is exact, and the counts are the same on any sharding.

    For methods that rank magnitudes, such as L1Unstructured; infinite scores have no LAMP score.

    Cost: one pass over the scores, and one all-reduce of 64 KB per parameter (512 KB for scores in
    float64, 8 KB in float16), in parts of 32 MB, besides what exact counts cost every call.

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
        more = num_to_prune(ranked, lowest, highest, total - sum(pruned))
        counts = [p + m for p, m in zip(pruned, more, strict=True)]
        wanted = (count / n if n else 0.0 for count, n in zip(counts, sizes, strict=True))
        return Counts(tuple(counts), tuple(wanted))


def num_to_prune(
    ranked: Ranked, lowest: Sequence[int], highest: Sequence[int], k: int
) -> list[int]:
    """How many of the ``k`` lowest LAMP scores each parameter has, within limits. Collective.

    Args:
        ranked: what the call ranks.
        lowest, highest: limits of each count, of elements that are not pruned yet.
        k: sum(lowest) <= k <= sum(highest).

    Raises:
        ValueError: a score is NaN or infinite; on every rank.
    """
    if k in (sum(lowest), sum(highest)):
        return list(lowest if k == sum(lowest) else highest)
    bins, names = _Bins.of(ranked.keys), ranked.names
    batch = max(1, _MOST_COUNTS // bins.number)
    curves = []
    for start in range(0, len(names), batch):
        parts = ranked.parts[start : start + batch]
        size = len(parts) * bins.number
        shared = ranked.communicator.reduce(size, partial(_count, parts, bins))
        curves += [bins.curve(row) for row in shared.view(len(parts), bins.number).numpy()]
    infinite = [name for name, curve in zip(names, curves, strict=True) if curve is None]
    if infinite:
        raise UnfitScores(
            f"scores of {', '.join(infinite)} are NaN or infinite; expected finite numbers for "
            "every unpruned element, because LAMP scores divide by their squares. Repair the "
            "weights, or mask them first with custom_from_mask.",
            "infinite",
            infinite,
        )
    found = [curve for curve in curves if curve is not None]
    owner = np.repeat(np.arange(len(found)), [curve[0].size for curve in found])
    counts, first, step = (np.concatenate(arrays) for arrays in zip(*found, strict=True))

    def num_pruned(inverse: float) -> Array:
        """Per parameter, the elements whose 1/score is no less, held within the limits."""
        number = np.clip(np.floor((first - inverse) / step) + 1, 0, counts)
        of_parameter = np.bincount(owner, weights=number, minlength=len(found))
        held: Array = np.clip(of_parameter.astype(np.int64), lowest, highest)
        return held

    # Bits of non-negative floats are in the order of the numbers.
    low, high = 0, _INFINITY
    while high - low > 1:
        middle = (low + high) // 2
        if int(num_pruned(_float_of(middle)).sum()) >= k:
            low = middle
        else:
            high = middle
    least, most = num_pruned(_float_of(high)), num_pruned(_float_of(low))
    # Equal scores of several parameters go in the order of the parameters.
    before = np.cumsum(most - least) - (most - least)
    divided = least + np.clip(k - int(least.sum()) - before, 0, most - least)
    return [int(count) for count in divided]


@dataclass(frozen=True)
class _Bins:
    """The bins of magnitudes, the same for all parameters of a call.

    Attributes:
        is_float: keys are the bits of scores; else integers, whose bits as float32 are counted.
        shift: a bin has 2**shift neighbouring floats; the last bin is that of what is not finite.
        low, high: float64, the smallest and the largest magnitude of each finite bin.
    """

    is_float: bool
    shift: int
    low: Array
    high: Array

    @classmethod
    def of(cls, keys: KeyRange) -> _Bins:
        dtype = keys.value_dtype if keys.is_float else torch.float32
        shift = round(-math.log2(torch.finfo(dtype).eps)) - _BITS
        infinity = int(torch.tensor(math.inf, dtype=dtype).view(INTEGERS[dtype.itemsize]))
        start = torch.arange(0, infinity, 1 << shift).to(INTEGERS[dtype.itemsize])
        ends = (start, start + ((1 << shift) - 1))
        low, high = (end.view(dtype).double().numpy() for end in ends)
        return cls(keys.is_float, shift, low, high)

    @property
    def number(self) -> int:
        return self.low.size + 1

    def count(self, keys: Tensor) -> Array:
        """How many of some keys lie in each bin."""
        if not self.is_float:
            keys = keys.float().abs_().view(torch.int32)
        if memory.takes_numpy(keys.device):
            last = self.low.size << self.shift
            return histogram_of(keys, Descent(0, last, 0, 0, self.shift)).numpy()
        number = (keys >> self.shift).clamp_(max=self.number - 1)
        counts: Array = torch.bincount(number, minlength=self.number).cpu().numpy()
        return counts

    def count_of_tally(self, keys: Array, counts: Array) -> Array:
        """:meth:`count` of keys that occur several times."""
        if not self.is_float:
            keys = np.abs(keys.astype(np.float32)).view(np.int32)
        number = np.minimum(keys >> self.shift, self.number - 1)
        # Exact: the counts of a rank are below 2**53.
        return np.bincount(number, counts, self.number).astype(np.int64)

    def curve(self, counts: Array) -> tuple[Array, Array, Array] | None:
        """Of each bin that holds elements: their number, the first 1/score, its fall per element.

        None if an element is not finite. See [Note: counts].
        """
        if counts[-1]:
            return None
        filled = np.flatnonzero(counts)
        number = counts[filled]
        # Squares are relative to the largest one, so that none overflows.
        largest = self.high[filled[-1]] if filled.size else 1.0
        low, high = self.low[filled] / largest, self.high[filled] / largest
        inside = number * ((low * low + low * high + high * high) / 3)
        above = np.append(np.cumsum(inside[::-1])[::-1][1:], 0.0)[: number.size]
        first = (above + inside) / np.maximum(low * low, _TINY)
        last = above / np.maximum(high * high, _TINY)
        return number, first, np.maximum((first - last) / number, 1.0)


def _count(parts: Sequence[Candidates], bins: _Bins) -> Tensor:
    """This rank's live elements in each bin of each part, one part after the other."""
    if are_tallied(parts):
        tallied = [bins.count_of_tally(*keys_of_tally(part)) for part in parts]
        return torch.from_numpy(np.concatenate(tallied))
    counts = np.zeros((len(parts), bins.number), dtype=np.int64)
    lock = threading.Lock()

    def add(position: int, span: range, scratch: Scratch) -> None:
        part = parts[position]
        keys = part.keys.load(span.start, span.stop, scratch).values
        if part.live is not None:
            live = part.live[span.start : span.stop]
            on_cpu = memory.takes_numpy(live.device)
            keys = memory.select(keys, torch.from_numpy(is_one(live)) if on_cpu else live == 1)
        found = bins.count(keys)
        with lock:
            counts[position] += found

    chunks = chunks_of(parts, only_counted=True)
    call_all([partial(add, *chunk) for chunk in chunks], num_threads_for(parts, chunks))
    return torch.from_numpy(counts.reshape(-1))


def _float_of(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))
