"""The search for the cut of a group's ranking: each pass over the keys decides 16 of their bits.

In every pass, the ranks together count all keys; between two passes the search narrows to one bin.
:class:`Search` cuts one ranking; ``limited_search`` does so within limits of each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distprune.files.ranking.histograms import descent_to, key_histogram, narrowed
from distprune.files.ranking.keys import Array
from distprune.files.ranking.units import PruneUnit, Span
from distprune.files.team import Team


@dataclass(frozen=True)
class Cut:
    """Where the ranking of a group is cut.

    Attributes:
        threshold: elements with a smaller key are pruned.
        num_ties: elements with this key; within limits, those that no limit decides on.
        num_ties_pruned: how many of these ties are pruned.
    """

    threshold: int
    num_ties: int
    num_ties_pruned: int


@dataclass(frozen=True)
class TensorCut:
    """Where a tensor in a group with limits is cut.

    Attributes:
        position: of the tensor.
        threshold: its elements with a smaller key are pruned.
        held_at: the limit that decided how many elements are pruned, "min_sparsity" or
            "max_sparsity"; None: the threshold is that of the group.
        num_ties: elements with this key that are pruned in any case: all that are pruned, if a
            limit decided.
        num_most: how many elements with this key may be pruned.
    """

    position: int
    threshold: int
    held_at: str | None
    num_ties: int
    num_most: int


@dataclass(frozen=True)
class SearchResult:
    """Where a group is cut.

    Attributes:
        cut: None if limits decide everything.
        quotas: by number of a unit, how many of its ties are pruned, the first ones. The ties are
            elements with the group's threshold in a unit of whole tensors, with the tensor's
            threshold in a part of a tensor.
        tensors: where each tensor is cut; empty without limits.
    """

    cut: Cut | None
    quotas: dict[int, int]
    tensors: list[TensorCut]


class Search:
    """The search for the k-th lowest key of a group.

    Args:
        team: the ranks.
        units: all units of pruning.
        numbers: which of them belong to the group.
        width: bits of the keys.
        k: how many elements are pruned; at least one.

    Memory: a histogram for each unit that this rank counts, of at most 256 KiB if no key occurs
    more often than 2**32 times in it, and of half of that or less for most weights.
    """

    def __init__(
        self, team: Team, units: Sequence[PruneUnit], numbers: Sequence[int], width: int, k: int
    ) -> None:
        self._team = team
        self._units = units
        self._numbers = numbers
        self._start = self._descent = descent_to(width, k)
        self._rows: dict[int, Array] = {}
        self._ties = torch.zeros(len(numbers), dtype=torch.int64)

    @property
    def is_done(self) -> bool:
        return self._descent.is_done

    @property
    def is_first(self) -> bool:
        """Whether no pass has ended yet."""
        return self._descent == self._start

    @property
    def num_bins(self) -> int:
        return self._descent.num_bins

    def counting(self, number: int) -> Counting:
        """A counter for the keys of a unit, once in every pass."""
        return Counting(self, number)

    def digits_of(self, span: Span, keys: Array, counts: Array | None = None) -> Array:
        """The histogram of the keys of a piece that are not decided yet."""
        return key_histogram(keys, self._descent, counts)

    def add_unit(self, number: int, row: Array) -> None:
        """Store the histogram of a unit."""
        # Most counts are small: as few bytes for each as the largest needs.
        self._rows[number] = row.astype(np.min_scalar_type(int(row.max())))

    def narrow(self) -> None:
        """Continue in one bin, after all ranks have counted all units."""
        self._descent, digit = narrowed(self._descent, self._sum(self._rows))
        if self.is_done:
            for index, number in enumerate(self._numbers):
                if number in self._rows:
                    self._ties[index] = int(self._rows[number][digit])
        self._rows.clear()

    def result(self) -> SearchResult:
        """The cut; call this on all ranks together."""
        ties = self._team.sum(self._ties).tolist()
        num_ties_pruned = self._descent.rank + 1
        quotas, num_left = {}, num_ties_pruned
        for number, num_ties in zip(self._numbers, ties, strict=True):
            quotas[number] = min(num_ties, num_left)
            num_left -= quotas[number]
        return SearchResult(Cut(self._descent.low, sum(ties), num_ties_pruned), quotas, [])

    def _sum(self, rows: Mapping[int, Array]) -> Array:
        """The sum of histograms, over all ranks."""
        histogram = np.zeros(self.num_bins, dtype=np.int64)
        for row in rows.values():
            histogram += row
        return self._team.sum(torch.from_numpy(histogram)).numpy()


class Counting:
    """Counts one unit in one pass: add the keys of its spans, piece by piece, in their order."""

    def __init__(self, search: Search, number: int) -> None:
        self._search = search
        self._number = number
        self._row = np.zeros(search.num_bins, dtype=np.int64)

    def add(self, span: Span, keys: Array, counts: Array | None = None) -> None:
        """Add keys; ``counts`` says how often each occurs, None: once."""
        self._row += self._search.digits_of(span, keys, counts)

    def end_span(self, span: Span) -> None:
        """Called when all keys of a span have been added."""

    def end_unit(self) -> None:
        self._search.add_unit(self._number, self._row)
