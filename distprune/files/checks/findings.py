"""What a comparison of source, result and masks has found: counts by tensor and by file.

The findings of several ranks add up, so each rank can read other units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from distprune._common.memory import Array
from distprune.files.planning import Plan
from distprune.files.text import printable

# What is counted for each tensor, by its position: pruned elements according to the mask, and to
# the recipe; NaN that are kept; zeros of the source; elements that are not as the mask says, and
# that the mask has otherwise than the recipe; bits after the end of the mask.
_COUNTS = ("pruned", "expected", "nan", "zero", "wrong", "misplaced", "tail")


class Findings:
    """Counts of what was compared, and what is wrong with it.

    Args:
        plan: of the source.

    Attributes:
        num_bytes: of the source that were compared.
    """

    def __init__(self, plan: Plan) -> None:
        self.num_bytes = 0
        self._plan = plan
        self._counts: dict[str, Counter[int]] = {what: Counter() for what in _COUNTS}
        # By what is wrong, and by position: the first element.
        self._first: dict[str, dict[int, int]] = {"wrong": {}, "misplaced": {}}
        self._thresholds: dict[int, int] = {}
        # By name of a file: how many bytes differ outside of the tensors, and the first of them.
        self._differences: dict[str, tuple[int, int]] = {}

    def add(self, what: str, position: int, count: int) -> None:
        """Count something of a tensor; ``what`` is one of ``_COUNTS``."""
        if count:
            self._counts[what][position] += count

    def add_wrong(self, what: str, position: int, are_wrong: Array, first: int) -> None:
        """Count elements from ``first`` on that are "wrong" or "misplaced"."""
        places = np.flatnonzero(are_wrong)
        if len(places):
            self._add_first(what, position, len(places), first + int(places[0]))

    def add_threshold(self, position: int, key: int) -> None:
        """Note a key that is to be pruned; the largest one of a tensor is its threshold."""
        self._thresholds[position] = max(key, self._thresholds.get(position, 0))

    def add_difference(self, name: str, count: int, first: int) -> None:
        """Count bytes of a file that are not those of the source, and note the first of them."""
        num_earlier, earlier = self._differences.get(name, (0, first))
        self._differences[name] = (num_earlier + count, min(earlier, first))

    def state(self) -> dict[str, Any]:
        """All findings, as JSON, for :meth:`merge`."""
        return {
            "num_bytes": self.num_bytes,
            "counts": {what: list(counts.items()) for what, counts in self._counts.items()},
            "first": {what: list(first.items()) for what, first in self._first.items()},
            "thresholds": list(self._thresholds.items()),
            "differences": self._differences,
        }

    def merge(self, state: dict[str, Any]) -> None:
        """Add the findings of another rank."""
        self.num_bytes += state["num_bytes"]
        for what, counts in state["counts"].items():
            for position, count in counts:
                self.add(what, position, count)
        for what, found in state["first"].items():
            for position, first in found:
                self._add_first(what, position, 0, first)
        for position, key in state["thresholds"]:
            self.add_threshold(position, key)
        for name, (count, first) in state["differences"].items():
            self.add_difference(name, count, first)

    @property
    def num_pruned(self) -> int:
        """Pruned elements, according to the masks."""
        return self._counts["pruned"].total()

    def records(self) -> list[dict[str, Any]]:
        """The counts as a journal of the run would record them."""
        counts = {
            "pruned": self._counts["expected"],
            "nan": self._counts["nan"],
            "zero": self._counts["zero"],
        }
        return [{**counts, "threshold": self._thresholds}]

    def problems(self) -> list[str]:
        """What is wrong with bytes, by file and tensor."""
        problems = [
            f"{printable(name)}: byte {first} differs from the source, and belongs to no pruned "
            "tensor" + (f"; so do {count - 1} more." if count > 1 else ".")
            for name, (count, first) in sorted(self._differences.items())
        ]
        for position in range(len(self._plan.tensors)):
            problems += self._tensor_problems(position)
        return problems

    def count_problems(self) -> list[str]:
        """Whether all units together prune as many elements as the recipe says."""
        if self.num_pruned == self._plan.num_to_prune:
            return []
        return [
            f"{self.num_pruned} elements are pruned in all; the recipe asks for "
            f"{self._plan.num_to_prune}."
        ]

    def _add_first(self, what: str, position: int, count: int, first: int) -> None:
        self.add(what, position, count)
        firsts = self._first[what]
        firsts[position] = min(first, firsts.get(position, first))

    def _tensor_problems(self, position: int) -> Iterator[str]:
        counts = {what: self._counts[what][position] for what in _COUNTS}
        name = printable(self._plan.tensors[position].entry.name)
        if counts["wrong"]:
            yield (
                f"{name}: {counts['wrong']} elements are neither kept as they were nor pruned as "
                f"the mask says; the first is number {self._first['wrong'][position]}."
            )
        if counts["tail"]:
            yield f"{name}: the last byte of its mask has bits that belong to no element."
        if counts["misplaced"]:
            yield (
                f"{name}: {counts['misplaced']} elements are pruned or kept against the order of "
                f"scores; the first is number {self._first['misplaced'][position]}."
            )
