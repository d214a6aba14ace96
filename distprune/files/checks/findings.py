"""What source, result and masks say when they are read side by side: counts, and no judgement.

The findings of several ranks add up, so that each rank reads other units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from distprune.files.checkpoints.mask_files import MASK_FILE, MaskFile, MaskLayout, read_keep
from distprune.files.checks.contents import shown
from distprune.files.checks.order import GroupOrder
from distprune.files.checks.ordering import Ranking
from distprune.files.disk.access import OpenFiles, read_into
from distprune.files.planning import Plan
from distprune.files.ranking.columns import ColumnCuts, is_too_large
from distprune.files.ranking.groups import Groups, groups_of
from distprune.files.ranking.scores import Array
from distprune.files.ranking.streaming import CHUNK, MAX_IN_MEMORY, Source
from distprune.files.ranking.units import CopyUnit, PruneUnit, Span

_PIECE = 8 << 20

# What is counted of a tensor, by its position.
_SUMS = (
    "pruned",
    "nan",
    "zero",
    "pruned_nan",
    "wrong",
    "misplaced",
    "disordered",
    "miscounted",
    "tail",
)


class Findings:
    """Reads units of work and adds up what is found.

    Args:
        plan: of the source.
        source: of the plan.
        folder: the result; its files have their sizes.
        layout: of its masks.
        outputs: opens the result's files for reading.

    Attributes:
        num_bytes: of the source that were compared.
    """

    def __init__(
        self, plan: Plan, source: Source, folder: Path, layout: MaskLayout, outputs: OpenFiles
    ) -> None:
        self.num_bytes = 0
        self._plan = plan
        self._source = source
        self._folder = folder
        self._outputs = outputs
        shapes = {tensor.entry.name: tensor.entry.shape for tensor in plan.tensors}
        self._masks = MaskFile(str(folder / MASK_FILE), shapes, {}, layout.starts)
        self._sums: dict[str, Counter[int]] = {what: Counter() for what in _SUMS}
        self._first_wrong: dict[int, int] = {}
        self._thresholds: dict[int, int] = {}
        # By name of a file: how many bytes differ outside of the tensors, and the first of them.
        self._copies: dict[str, tuple[int, int]] = {}
        # By position of a tensor that is ranked with others; the places are those of the ranking.
        self._rankings: dict[int, Ranking] = {}

    def orders(self) -> dict[int, GroupOrder]:
        """By number of a group whose tensors are ranked together, what is known of its order."""
        return {
            number: GroupOrder(
                self._plan,
                number,
                {p: r for p, r in self._rankings.items() if group.first <= p < group.last},
            )
            for number, group in enumerate(self._plan.groups)
            if group.recipe.is_together
        }

    @property
    def num_pruned(self) -> int:
        return self._sums["pruned"].total()

    @property
    def num_nan(self) -> dict[int, int]:
        """By position of a tensor that holds some."""
        return dict(self._sums["nan"])

    def compare_copied(self, unit: CopyUnit) -> Iterator[int]:
        """Read bytes that have to be equal; yields the bytes."""
        path = str(self._folder / unit.name)
        for start in range(unit.start, unit.stop, _PIECE):
            size = min(_PIECE, unit.stop - start)
            pair = [np.empty(size, dtype=np.uint8) for _ in range(2)]
            read_into(self._source.files, unit.path, start, memoryview(pair[0]))
            read_into(self._outputs, path, start, memoryview(pair[1]))
            different = np.flatnonzero(pair[0] != pair[1])
            if len(different):
                self._differs(unit.name, len(different), start + int(different[0]))
            self.num_bytes += size
            yield size

    def compare_pruned(self, unit: PruneUnit) -> Iterator[int]:
        """Read elements of selected tensors, and their masks; yields the bytes of the source."""
        for span in unit.spans:
            tensor = self._plan.tensors[span.position]
            if tensor.num_groups == 0:
                ranking = self._rankings.setdefault(span.position, Ranking())
                yield from self._ranked(span, ranking, tensor.offset)
                continue
            groups = groups_of(tensor, self._plan.recipe_of(span.position))
            if is_too_large(groups):
                yield from self._in_columns(span, groups)
                continue
            if groups.size <= MAX_IN_MEMORY:
                yield from self._in_groups(span)
                continue
            for first in range(span.first, span.last, groups.size):
                ranking = Ranking()
                part = Span(span.position, first, first + groups.size)
                yield from self._ranked(part, ranking, 0)
                self._add("disordered", span.position, not ranking.is_ordered)
                is_miscounted = ranking.num_pruned != groups.num_pruned
                self._add("miscounted", span.position, is_miscounted)

    def state(self) -> dict[str, Any]:
        """All that was found, as JSON, for :meth:`merge`."""
        return {
            "num_bytes": self.num_bytes,
            "sums": {what: list(counts.items()) for what, counts in self._sums.items()},
            "first_wrong": list(self._first_wrong.items()),
            "thresholds": list(self._thresholds.items()),
            "copies": self._copies,
            "rankings": [(p, ranking.state()) for p, ranking in self._rankings.items()],
        }

    def merge(self, state: dict[str, Any]) -> None:
        """Add what another rank has found."""
        self.num_bytes += state["num_bytes"]
        for what, counts in state["sums"].items():
            for position, count in counts:
                self._add(what, position, count)
        for position, first in state["first_wrong"]:
            self._first_wrong[position] = min(first, self._first_wrong.get(position, first))
        for position, key in state["thresholds"]:
            self._thresholds[position] = max(key, self._thresholds.get(position, 0))
        for name, (count, first) in state["copies"].items():
            self._differs(name, count, first)
        for position, ranking in state["rankings"]:
            self._rankings.setdefault(position, Ranking()).merge(Ranking(ranking))

    def records(self) -> list[dict[str, Any]]:
        """The counts as a journal of the run would hold them."""
        found = {what: self._sums[what] for what in ("pruned", "nan", "zero")}
        return [{**found, "threshold": self._thresholds}]

    def problems(self) -> list[str]:
        """What is wrong with bytes, by file and tensor."""
        problems = [
            f"{shown(name)}: byte {first} differs from the source, and belongs to no pruned tensor"
            + (f"; so do {count - 1} more." if count > 1 else ".")
            for name, (count, first) in sorted(self._copies.items())
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
        counts = {what: self._sums[what][position] for what in _SUMS}
        name = shown(tensor.entry.name)
        if counts["wrong"]:
            yield (
                f"{name}: {counts['wrong']} elements are neither kept as they were nor pruned as "
                f"the mask says; the first is number {self._first_wrong[position]}."
            )
        if counts["tail"]:
            yield f"{name}: the last byte of its mask has bits that belong to no element."
        if counts["nan"] and self._plan.recipe.nan == "error":
            yield f"{name}: {counts['nan']} elements are NaN, which the recipe refuses."
        if counts["pruned_nan"]:
            yield f"{name}: {counts['pruned_nan']} pruned elements are NaN, which are to be kept."
        if counts["misplaced"]:
            yield (
                f"{name}: {counts['misplaced']} elements are pruned or kept against the order of "
                f"scores in their groups, each of which loses {tensor.num_pruned_per_group}."
            )
        if counts["disordered"]:
            yield (
                f"{name}: in {counts['disordered']} of {tensor.num_groups} groups an element is "
                "pruned that comes after a kept one in the order of scores."
            )
        if counts["miscounted"]:
            yield (
                f"{name}: {counts['miscounted']} of {tensor.num_groups} groups do not lose "
                f"{tensor.num_pruned_per_group} elements, as the recipe asks for."
            )

    def _ranked(self, span: Span, ranking: Ranking, offset: int) -> Iterator[int]:
        """Elements that are ranked with others, or are one group too large to hold."""
        for first, keys, keep, num_bytes in self._pieces(span, CHUNK):
            ranking.add(keys, keep, offset + first)
            yield num_bytes

    def _in_columns(self, span: Span, groups: Groups) -> Iterator[int]:
        """Groups that are interleaved in blocks too large to hold."""
        for start in range(span.first, span.last, groups.block):
            cuts = ColumnCuts(self._source, span.position, start, groups)
            for _ in cuts.find():
                yield 0
            block = Span(span.position, start, start + groups.block)
            for _, keys, keep, num_bytes in self._pieces(block, cuts.step):
                num_misplaced = int(np.count_nonzero(cuts.lowest(keys) == keep))
                self._add("misplaced", span.position, num_misplaced)
                yield num_bytes

    def _in_groups(self, span: Span) -> Iterator[int]:
        tensor = self._plan.tensors[span.position]
        groups = groups_of(tensor, self._plan.recipe_of(span.position))
        step = max(CHUNK // groups.block, 1) * groups.block
        for _, keys, keep, num_bytes in self._pieces(span, step):
            num_misplaced = int(np.count_nonzero(groups.lowest(keys) == keep))
            self._add("misplaced", span.position, num_misplaced)
            yield num_bytes

    def _pieces(self, span: Span, step: int) -> Iterator[tuple[int, Array, Array, int]]:
        """(first element, keys, keep, bytes) in order; compares the values on the way."""
        position = span.position
        tensor = self._plan.tensors[position]
        entry = tensor.entry
        key_format = self._source.format_of(position)
        path, size = str(self._folder / entry.file), self._source.itemsize(position)
        for first in range(span.first, span.last, step):
            last = min(first + step, span.last)
            bits = self._source.read_bits(position, first, last)
            result = np.empty_like(bits)
            start = entry.start + first * size
            read_into(self._outputs, path, start, memoryview(result).cast("B"))
            keep = read_keep(self._masks, self._outputs, entry.name, first, last)
            wrong = np.flatnonzero(result != bits * keep)
            if len(wrong):
                self._add("wrong", position, len(wrong))
                where = first + int(wrong[0])
                self._first_wrong[position] = min(where, self._first_wrong.get(position, where))
            keys = self._source.keys_of(position, first, bits)
            self._add("pruned", position, len(keep) - int(np.count_nonzero(keep)))
            self._add("zero", position, len(bits) - int(np.count_nonzero(bits << 1)))
            num_nan = key_format.count_nan(keys)
            self._add("nan", position, num_nan)
            if num_nan:
                self._add("pruned_nan", position, key_format.count_nan(keys[~keep]))
            if tensor.num_groups == 1 and not keep.all():
                largest = int((keys * ~keep).max())
                self._thresholds[position] = max(largest, self._thresholds.get(position, 0))
            self.num_bytes += bits.nbytes
            yield first, keys, keep, bits.nbytes
        if span.last == entry.numel and span.last % 8:
            self._add("tail", position, self._has_tail(position))

    def _has_tail(self, position: int) -> bool:
        """Whether bits are set behind the last element of a mask."""
        entry = self._plan.tensors[position].entry
        last = np.empty(1, dtype=np.uint8)
        offset = self._masks.starts[entry.name] + entry.numel // 8
        read_into(self._outputs, self._masks.path, offset, memoryview(last))
        return bool(last[0] >> entry.numel % 8)

    def _add(self, what: str, position: int, count: int) -> None:
        if count:
            self._sums[what][position] += int(count)

    def _differs(self, name: str, count: int, first: int) -> None:
        before = self._copies.get(name, (0, first))
        self._copies[name] = (before[0] + count, min(before[1], first))
