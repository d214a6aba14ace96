"""What a comparison of source, result and masks has found: counts by tensor and by file.

The findings of several ranks add up, so each rank can read other units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from distprune.files.checks.boundary import Boundary
from distprune.files.checks.group_order import GroupOrder
from distprune.files.planning import Plan
from distprune.files.text import printable

# What is counted for each tensor, by its position.
_COUNTS = (
    "pruned",
    "nan",
    "zero",
    "pruned_nan",
    "wrong",
    "misplaced",
    "disordered",
    "miscounted",
    "tail",
    "torn",
)


class Findings:
    """Counts of what was compared, and what is wrong with it.

    Args:
        plan: of the source.

    Attributes:
        num_bytes: of the source that were compared.
        boundaries: by position of a tensor that is ranked together with others; the places are
            those of the group's ranking.
    """

    def __init__(self, plan: Plan) -> None:
        self.num_bytes = 0
        self.boundaries: dict[int, Boundary] = {}
        self._plan = plan
        self._counts: dict[str, Counter[int]] = {what: Counter() for what in _COUNTS}
        self._first_wrong: dict[int, int] = {}
        self._thresholds: dict[int, int] = {}
        # By name of a file: how many bytes differ outside of the tensors, and the first of them.
        self._differences: dict[str, tuple[int, int]] = {}

    def add(self, what: str, position: int, count: int) -> None:
        """Count something of a tensor; ``what`` is one of ``_COUNTS``."""
        if count:
            self._counts[what][position] += count

    def add_wrong(self, position: int, count: int, first: int) -> None:
        """Count elements that differ from what the mask says, and note the first of them."""
        self.add("wrong", position, count)
        self._first_wrong[position] = min(first, self._first_wrong.get(position, first))

    def add_threshold(self, position: int, key: int) -> None:
        """Note a key that was pruned; the largest one of a tensor is its threshold."""
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
            "first_wrong": list(self._first_wrong.items()),
            "thresholds": list(self._thresholds.items()),
            "differences": self._differences,
            "boundaries": [(p, boundary.state()) for p, boundary in self.boundaries.items()],
        }

    def merge(self, state: dict[str, Any]) -> None:
        """Add the findings of another rank."""
        self.num_bytes += state["num_bytes"]
        for what, counts in state["counts"].items():
            for position, count in counts:
                self.add(what, position, count)
        for position, first in state["first_wrong"]:
            self.add_wrong(position, 0, first)
        for position, key in state["thresholds"]:
            self.add_threshold(position, key)
        for name, (count, first) in state["differences"].items():
            self.add_difference(name, count, first)
        for position, boundary in state["boundaries"]:
            own = self.boundaries.setdefault(position, Boundary())
            own.merge(Boundary.from_state(boundary))

    @property
    def num_pruned(self) -> int:
        return self._counts["pruned"].total()

    @property
    def num_nan(self) -> dict[int, int]:
        """By position of a tensor that has some."""
        return dict(self._counts["nan"])

    def orders(self) -> dict[int, GroupOrder]:
        """The order of each group whose tensors are ranked together, by the group's number."""
        return {
            number: GroupOrder(
                self._plan,
                number,
                {p: b for p, b in self.boundaries.items() if group.first <= p < group.last},
            )
            for number, group in enumerate(self._plan.groups)
            if group.recipe.is_together
        }

    def records(self) -> list[dict[str, Any]]:
        """The counts as a journal of the run would record them."""
        counts = {what: self._counts[what] for what in ("pruned", "nan", "zero")}
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
        for order in self.orders().values():
            problems += order.problems()
        return problems

    def count_problems(self) -> list[str]:
        """Whether all units together prune as many elements as the recipe says."""
        if self.num_pruned == self._plan.num_to_prune:
            return []
        return [
            f"{self.num_pruned} elements are pruned in all; the recipe asks for "
            f"{self._plan.num_to_prune}."
        ]

    def _tensor_problems(self, position: int) -> Iterator[str]:
        tensor = self._plan.tensors[position]
        counts = {what: self._counts[what][position] for what in _COUNTS}
        name = printable(tensor.entry.name)
        is_tiled = self._plan.recipe_of(position).tile is not None
        what, one = ("tiles", "a tile") if is_tiled else ("elements", "an element")
        if counts["wrong"]:
            yield (
                f"{name}: {counts['wrong']} elements are neither kept as they were nor pruned as "
                f"the mask says; the first is number {self._first_wrong[position]}."
            )
        if counts["tail"]:
            yield f"{name}: the last byte of its mask has bits that belong to no element."
        if counts["torn"]:
            yield f"{name}: {counts['torn']} tiles are neither pruned nor kept as a whole."
        if counts["nan"] and self._plan.recipe.nan == "error":
            are = "have a NaN" if is_tiled else "are NaN"
            yield f"{name}: {counts['nan']} {what} {are}, which the recipe refuses."
        if counts["pruned_nan"]:
            yield f"{name}: {counts['pruned_nan']} pruned elements are NaN, which are to be kept."
        if counts["misplaced"]:
            yield (
                f"{name}: {counts['misplaced']} {what} are pruned or kept against the order of "
                f"scores in their groups, each of which loses {tensor.num_pruned_per_group}."
            )
        if counts["disordered"]:
            yield (
                f"{name}: in {counts['disordered']} of {tensor.num_groups} groups {one} is "
                "pruned that comes after a kept one in the order of scores."
            )
        if counts["miscounted"]:
            yield (
                f"{name}: {counts['miscounted']} of {tensor.num_groups} groups do not lose "
                f"{tensor.num_pruned_per_group} {what}, as the recipe asks for."
            )
